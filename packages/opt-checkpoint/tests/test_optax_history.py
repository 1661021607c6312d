"""States that old Optax wrote restore under the newest, and training goes on as if it had."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import old_optax as cases
import optax
import pytest
from opt_checkpoint import read_legacy, restore_legacy
from opt_checkpoint.errors import VersionError
from opt_core import Optimizer
from opt_core.errors import RestoreError
from opt_optax_bridge import OptaxWrapper

FOLDER = Path(__file__).parent / "optax_states"
FILES = sorted(FOLDER.glob("*/*.msgpack"))
# Optax has changed what it computes: the states restore, and mean nearly the same.
OTHER_NUMBERS = {
    ("0.1.7", "adabelief"): "optax#1130, since 0.2.4",
    ("0.2.1", "adabelief"): "optax#1130, since 0.2.4",
    ("0.2.3", "adabelief"): "optax#1130, since 0.2.4",
    ("0.1.7", "noisy_sgd"): "other random numbers",
    ("0.2.1", "noisy_sgd"): "other random numbers",
    ("0.2.3", "lbfgs"): "the line search finds another step",
}
# How the last line search went is told since 0.2.4; the next search tells anew.
WITHOUT_REPORT = {("0.2.1", "backtracking"), ("0.2.3", "backtracking")}

pytestmark = pytest.mark.usefixtures("optax_promotion")


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def create(case: str) -> Optimizer:
    return OptaxWrapper(cases.CASES[case]()).create(cases.params())


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_b2_states_of_old_optax(path: Path) -> None:
    """States of Optax 0.1.7, 0.2.1, 0.2.3, 0.2.4, 0.2.5 restore, and go on as today's do."""
    restored = restore_legacy(create(path.stem), path)
    assert int(restored.state.step) == cases.STEPS
    saved = read_legacy(path)
    for a, b in zip(
        jax.tree.leaves(restored.target), jax.tree.leaves(saved["params"]), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    if (path.parent.name, path.stem) in OTHER_NUMBERS:
        return
    start = (restored.target, restored.state.param_states)
    after_five, after_eight = todays(path.stem)
    if (path.parent.name, path.stem) not in WITHOUT_REPORT:
        assert_close(start, after_five)
    # L-BFGS divides by products of differences, as small as 1e-9: jax 0.8 rounds 2e-5 away.
    rtol = 1e-4 if path.stem == "lbfgs" else 1e-5
    assert_close(run(path.stem, start, 3), after_eight, rtol)


@functools.cache
def compiled(case: str) -> Callable[..., Any]:
    return jax.jit(cases.step(cases.CASES[case]()))


def run(case: str, start: Any, steps: int) -> Any:
    for _ in range(steps):
        start = compiled(case)(*start)
    return start


@functools.cache
def todays(case: str) -> tuple[Any, Any]:
    """Parameters and state after as many steps as were saved, and after 3 more."""
    optimizer = create(case)
    first = run(case, (optimizer.target, optimizer.state.param_states), cases.STEPS)
    return first, run(case, first, 3)


def assert_close(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def test_a_dog_that_has_not_run_is_refused() -> None:
    """Before its first step, its state of before 0.2.6 held zeros for the first parameters."""
    contents = read_legacy(FOLDER / "0.2.5/dog.msgpack")
    contents["opt_state"]["1"]["first_step"] = np.array(True)
    with pytest.raises(
        VersionError,
        match=r"`state/param_states/1`: this state of `dog` was saved before its first step",
    ):
        restore_legacy(create("dog"), contents)


def test_multi_steps_before_it_could_skip() -> None:
    """Optax 0.1.2 does not run on any JAX of today: its layout is 0.1.7's without `skip_state`."""
    contents = read_legacy(FOLDER / "0.1.7/multi_steps.msgpack")
    del contents["opt_state"]["skip_state"]
    data = flax.serialization.msgpack_serialize(contents)
    for tx in (
        optax.MultiSteps(optax.adam(0.01), 3),
        optax.MultiSteps(optax.adam(0.01), 3, should_skip_update_fn=optax.skip_not_finite),
    ):
        optimizer = OptaxWrapper(tx.gradient_transformation()).create(cases.params())
        restored = restore_legacy(optimizer, data)
        assert int(restored.state.param_states.mini_step) == cases.STEPS % 3


def test_migrations_do_not_take_other_states_for_theirs() -> None:
    """Adam's state is not RMSProp's with a count, outside of schedule-free Adam."""
    contents = read_legacy(FOLDER / "0.2.4/adamw.msgpack")
    rmsprop = OptaxWrapper(optax.rmsprop(0.1, bias_correction=True)).create(cases.params())
    with pytest.raises(RestoreError, match="mu/scale: extra"):
        restore_legacy(rmsprop, contents)
