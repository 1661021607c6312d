"""An optimizer that did not change is restored without a word, whatever it is nested in."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from opt_checkpoint import Stack, named_state, plan_restore
from opt_core import Optimizer
from opt_core.state_changes import all_survive
from opt_optax_bridge import OptaxWrapper

contrib: Any = optax.contrib  # exports most of its names in no `__all__`

pytestmark = pytest.mark.usefixtures("optax_promotion")

_RATE = optax.linear_schedule(1.0, 0.0, 100)
_LABELS = {"a": "x", "b": "y"}


def abstract(tx: Any) -> Optimizer:
    """Leaves without values: nothing can be found by agreeing counts."""
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones(3)}
    made: Optimizer = jax.eval_shape(lambda: OptaxWrapper(tx).create(params))
    return made


def groups(x: Any, y: Any) -> Any:
    return optax.partition({"x": x, "y": y}, _LABELS)


def steps(tx: Any, k: Any, **options: Any) -> Any:
    return optax.MultiSteps(tx, k, **options).gradient_transformation()


def mask(tx: Any, *names: str) -> Any:
    return optax.masked(tx, {name: name in names for name in "ab"})


def everything_in(label: str) -> Any:
    return lambda tree: jax.tree.map(lambda _: label, tree)


_OPTIMIZERS = {
    "outer schedule": optax.chain(
        groups(optax.adamw(_RATE), optax.sgd(_RATE)), optax.scale_by_schedule(_RATE)
    ),
    "schedules alone": groups(optax.sgd(_RATE), optax.sgd(_RATE)),
    "outer adam": optax.chain(
        optax.scale_by_adam(), groups(optax.scale_by_adam(), optax.identity())
    ),
    "windows in a window": steps(groups(steps(optax.sgd(0.1), 2), optax.sgd(0.1)), 3),
    "two levels": groups(
        optax.chain(
            mask(optax.adam(0.1), "a"),
            optax.partition({"q": optax.adam(_RATE), "r": optax.adam(0.1)}, everything_in("q")),
            optax.scale_by_schedule(_RATE),
        ),
        optax.sgd(_RATE, 0.9),
    ),
    "masks": optax.chain(mask(optax.adam(0.1), "a"), mask(optax.adam(0.1), "b")),
    "mask in a mask": mask(mask(optax.adam(0.1), "a", "b"), "a"),
    "sam": contrib.sam(optax.sgd(0.1, 0.9), optax.sgd(0.2, 0.5)),
    "named": optax.named_chain(("one", optax.adam(0.1)), ("two", optax.adam(0.2))),
    "windows": steps(steps(optax.sgd(0.1, 0.9), 3), 2),
    "finite": optax.apply_if_finite(optax.apply_if_finite(optax.adam(0.1), 3), 5),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.add_noise(0.1, 0.5, 1)),
    "muon": contrib.muon(0.1),
    "schedule free": contrib.schedule_free(optax.adam(0.1), learning_rate=0.1),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=_RATE),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_is_restored_into_itself(name: str) -> None:
    optimizer = abstract(_OPTIMIZERS[name])
    plan = plan_restore(named_state(optimizer), optimizer)
    assert plan.is_exact, str(plan)


def test_a_group_that_took_in_a_parameter_is_not_as_it_was() -> None:
    both = {"a": "x", "b": "x"}
    before = abstract(groups(optax.adam(0.1), optax.adam(0.1)))
    after = abstract(
        optax.partition({"x": optax.adam(0.1), "y": optax.adam(0.1)}, both),
    )
    rows = {row.leaf.name: row for row in plan_restore(named_state(before), after).rows}
    assert rows["state/groups/x/adam/count"].note.startswith(
        "reinitialised: nothing says whether its groups"
    )


def changes_of(old: Any, new: Any) -> tuple[str, ...]:
    return plan_restore(named_state(abstract(old)), abstract(new)).changes


def behind_a_partial(nesterov: bool) -> Any:
    tx = optax.trace(0.9, nesterov=nesterov)

    def run(update: Any, updates: Any, state: Any, params: Any = None) -> Any:
        return update(updates, state, params)

    return optax.GradientTransformation(tx.init, functools.partial(run, tx.update))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (optax.trace(0.9, nesterov=np.bool_(True)), optax.trace(0.9, nesterov=False)),  # type: ignore[arg-type]
        (optax.trace(0.9, nesterov=1), optax.trace(0.9, nesterov=False)),  # type: ignore[arg-type]
        (behind_a_partial(True), behind_a_partial(False)),
    ],
)
def test_a_switch_is_seen_however_it_is_given(old: Any, new: Any) -> None:
    assert changes_of(old, new)[0].startswith("`nesterov` of `trace` was ")
    assert not changes_of(old, old)


def test_a_switch_that_is_given_otherwise_is_the_same() -> None:
    given: Any = np.bool_(True)
    assert not changes_of(optax.trace(0.9, nesterov=given), optax.trace(0.9, nesterov=True))


def test_a_mask_is_no_setting() -> None:
    one, other = ({"a": first, "b": not first} for first in (True, False))
    assert not changes_of(optax.masked(optax.clip(1.0), one), optax.masked(optax.clip(1.0), other))
    assert not changes_of(
        optax.add_decayed_weights(0.1, mask=one), optax.add_decayed_weights(0.1, mask=other)
    )


def test_a_stack_counts() -> None:
    optimizer = abstract(optax.identity())
    with pytest.raises(ValueError, match=r"source of a `Stack` must have `\{i\}`"):
        plan_restore(named_state(optimizer), optimizer, rules=[("params/a", Stack("params/b"))])


@pytest.mark.parametrize(
    ("value", "dtype", "is_kept"),
    [
        (1e-9, "float16", False),
        (-1e-9, "float16", False),
        (1e-4, "float16", True),
        (0.0, "float16", True),
        (1e-30, "bfloat16", True),
        (1e-39, "float16", True),  # subnormal: devices take it for 0
        (np.nan, "float16", True),
    ],
)
def test_a_value_that_would_become_0_does_not_fit(value: float, dtype: str, is_kept: bool) -> None:
    before = np.array([1.0, value], np.float32)
    assert bool(all_survive(before, before.astype(jnp.dtype(dtype)))) == is_kept
