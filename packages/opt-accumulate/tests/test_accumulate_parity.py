"""`MultiSteps` against Optax's own: the same numbers, to the bit, wherever Optax's are finite."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import MultiSteps, skip_large_updates, skip_not_finite

KEY = jax.random.key(0)
PARAMS = {"kernel": jax.random.normal(KEY, (17, 5)), "bias": jnp.linspace(-1.0, 1.0, 5)}

INNER = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(optax.linear_schedule(1e-2, 1e-3, 4)),
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "adafactor": optax.adafactor(1e-2),
    "masked": optax.masked(optax.adam(1e-2), {"kernel": True, "bias": False}),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "noisy": optax.noisy_sgd(0.1, key=jax.random.key(1)),
}


def three_then_two(step: jax.Array) -> jax.Array:
    return jnp.where(step < 2, 3, 2)


def every_third(updates: Any, gradient_step: jax.Array, params: Any) -> tuple[jax.Array, Any]:
    del gradient_step, params
    return updates["bias"][0] > 0.7, {"should_skip": updates["bias"][0] > 0.7, "bias": updates}


OPTIONS: dict[str, dict[str, Any]] = {
    "mean of 3": {"every_k_schedule": 3},
    "sum of 3": {"every_k_schedule": 3, "use_grad_mean": False},
    "1": {"every_k_schedule": 1},
    "schedule": {"every_k_schedule": three_then_two},
    "skip": {"every_k_schedule": 2, "should_skip_update_fn": every_third},
}
HAS_ACCUMULATOR_DTYPE = "accumulator_dtype" in inspect.signature(optax.MultiSteps).parameters
if HAS_ACCUMULATOR_DTYPE:  # since 0.2.7
    OPTIONS["float32"] = {"every_k_schedule": 3, "accumulator_dtype": jnp.float32}
    OPTIONS["None"] = {"every_k_schedule": 3, "accumulator_dtype": None}


# Made once: random numbers inside of a program are most of what there is to compile.
KEYS = jax.vmap(lambda index: jax.random.fold_in(KEY, index))(jnp.arange(16))
GRADS = jax.tree.map(lambda p: jax.vmap(lambda key: jax.random.normal(key, p.shape))(KEYS), PARAMS)


def grads_at(index: Any) -> Any:
    return jax.tree.map(lambda rows: rows[index], GRADS)


def run(steps: Any, state: Any, params: Any, indices: range) -> Any:
    """Returns the parameters, the state and all updates after some mini-steps."""
    update = jax.jit(steps.update)
    emitted = []
    for index in indices:
        updates, state = update(grads_at(index), state, params)
        params = optax.apply_updates(params, updates)
        emitted.append(updates)
    return params, state, emitted


def assert_same(ours: Any, theirs: Any, *, exact: bool = False) -> None:
    """Structure, dtypes and numbers: every bit, or but for the rounding of fused multiply-adds.

    XLA contracts `a * b + c` where it finds the two in one fusion, and the programs differ in that.
    """
    chex.assert_trees_all_equal_structs(ours, theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("inner", ["sgd", "clipped adam"])
def test_float32_is_the_same_to_the_bit(inner: str, options: str) -> None:
    with jax.disable_jit():
        check_parity(inner, options, exact=True)


CASES = [("clipped adam", name) for name in OPTIONS] + [(name, "schedule") for name in INNER]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("inner", "options"), sorted(set(CASES)))
def test_compiled_steps_are_the_same(inner: str, options: str) -> None:
    check_parity(inner, options, exact=False)


def check_parity(inner: str, options: str, exact: bool) -> None:
    ours: Any = MultiSteps(INNER[inner], **OPTIONS[options])
    theirs: Any = optax.MultiSteps(INNER[inner], **OPTIONS[options])
    assert_same(ours.init(PARAMS), theirs.init(PARAMS))
    found = run(ours, ours.init(PARAMS), PARAMS, range(9))
    expected = run(theirs, theirs.init(PARAMS), PARAMS, range(9))
    assert_same(found, expected, exact=exact)
    assert int(found[1].gradient_step) >= 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("switch", [1, 4])
@pytest.mark.parametrize("options", ["sum of 3", "schedule", "skip"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_live_state_moves_in_the_middle_of_a_window(
    ours_first: bool, options: str, switch: int
) -> None:
    inner = INNER["clipped adam"]
    pair: list[Any] = [
        MultiSteps(inner, **OPTIONS[options]),
        optax.MultiSteps(inner, **OPTIONS[options]),
    ]
    first, second = pair if ours_first else pair[::-1]
    params, state, _ = run(first, first.init(PARAMS), PARAMS, range(switch))
    params, state, _ = run(second, state, params, range(switch, 8))
    expected = run(first, first.init(PARAMS), PARAMS, range(8))
    assert_same((params, state), expected[:2])


SKIPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "not finite": (skip_not_finite, optax.skip_not_finite),
    "large": (
        functools.partial(skip_large_updates, max_squared_norm=85.0),
        functools.partial(optax.skip_large_updates, max_squared_norm=85.0),
    ),
}


@pytest.mark.parametrize("skip", SKIPS)
def test_skip_functions_decide_and_report_as_optax(skip: str) -> None:
    ours, theirs = SKIPS[skip]
    skipped = 0
    for index in range(12):
        grads = grads_at(index)
        if index % 5 == 2:
            grads["bias"] = grads["bias"].at[3].set(jnp.nan).at[1].set(jnp.inf)
        found, expected = ours(grads, 0, None), theirs(grads, 0, None)
        assert_same(found, expected)
        skipped += int(found[0])
    assert 0 < skipped < 12
