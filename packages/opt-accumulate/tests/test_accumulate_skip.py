"""Skip functions: Optax's two where Optax is wrong, those that remember, and combinations."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import (
    MultiSteps,
    all_of,
    any_of,
    check_skips,
    errors,
    skip_large_updates,
    skip_not_finite,
    skip_outliers,
)

PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(())}
SGD = optax.sgd(1.0)


def grads_of(value: Any) -> Any:
    return {"w": jnp.full(2, value, jnp.float32), "b": jnp.zeros(())}


def norm_of(value: float) -> float:
    return abs(value) * 2**0.5


def decide(function: Any, values: list[float]) -> tuple[list[bool], Any]:
    """Returns what a function that remembers says of gradients, one after another."""
    state, said = function.init(PARAMS), []
    call = jax.jit(lambda grads, state: function(grads, jnp.int32(0), None, state))
    for value in values:
        skip, new = call(grads_of(value), state)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        assert bool(new["should_skip"]) == bool(skip)
        state = new
        said.append(bool(skip))
    return said, state


def train(steps: Any, values: list[Any]) -> tuple[list[float], Any]:
    state, added = steps.init(PARAMS), []
    update = jax.jit(steps.update)
    for value in values:
        updates, new = update(grads_of(value), state, PARAMS)
        chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
        state = new
        added.append(float(updates["w"][0]))
    return added, state


# Optax's two


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan, complex(0, np.inf), complex(np.nan)])
def test_not_finite(value: Any) -> None:
    bad = jnp.array([1.0, value, value])
    skip, state = skip_not_finite({"good": jnp.ones(3), "bad": bad}, 0, None)
    assert (bool(skip), int(state["num_not_finite"])) == (True, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("value", "dtype"), [(300.0, jnp.float16), (3 + 4j, jnp.complex64)])
def test_squares_that_optax_cannot_take(value: Any, dtype: Any) -> None:
    updates = jnp.full(1, value, dtype)
    squared = abs(value) ** 2
    limits, theirs = (1.01 * squared, 0.99 * squared), []
    for limit, expected in zip(limits, (False, True), strict=True):
        skip, state = skip_large_updates(updates, 0, None, max_squared_norm=limit)
        assert bool(skip) == expected
        assert float(state["norm_squared"]) == pytest.approx(squared, rel=1e-6)
        theirs.append(bool(optax.skip_large_updates(updates, 0, None, limit)[0]))
    assert theirs == ([True, True] if dtype == jnp.float16 else [False, False])


# What a skip function may return


def negative(updates: Any, gradient_step: Any, params: Any) -> tuple[Any, Any]:
    return updates["w"][0] < 0, ()


def test_the_decision_is_kept_where_the_function_does_not_keep_it() -> None:
    steps = MultiSteps(SGD, 2, should_skip_update_fn=negative)
    added, state = train(steps, [1.0, 1.0, -1.0])
    assert added == [0.0, -1.0, 0.0]
    assert bool(state.skip_state["should_skip"])
    assert not steps.has_updated(state)
    theirs = optax.MultiSteps(SGD, 2, should_skip_update_fn=negative)
    _, their_state = train(theirs, [1.0, 1.0, -1.0])
    assert their_state.skip_state == ()
    assert theirs.has_updated(their_state)
    added, _ = train_on(steps, their_state, [3.0, 5.0])
    assert added == [0.0, -4.0]
    added, _ = train_on(theirs, state, [3.0, 5.0])
    assert added == [0.0, -4.0]


def train_on(steps: Any, state: Any, values: list[float]) -> tuple[list[float], Any]:
    added, update = [], jax.jit(steps.update)
    for value in values:
        updates, state = update(grads_of(value), state, PARAMS)
        added.append(float(updates["w"][0]))
    return added, state


@pytest.mark.parametrize("answer", [True, np.bool_(True), jnp.array(True)])
def test_booleans_of_every_kind(answer: Any) -> None:
    steps = MultiSteps(SGD, 1, should_skip_update_fn=lambda *_: (answer, {"seen": jnp.int32(1)}))
    added, state = train(steps, [1.0])
    assert added == [0.0]
    assert int(state.skip_state["skip_state"]["seen"]) == 1


# A guard that a running job gets, changes or loses


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (None, any_of(skip_not_finite), "num_skipped: expected a leaf, found none"),
        (skip_not_finite, any_of(skip_not_finite), "num_not_finite: expected none, found a leaf"),
        (any_of(negative), any_of(negative, negative), "num_by_function/1: expected a leaf"),
        (skip_outliers(3.0), None, "there are none"),
    ],
)
def test_states_of_another_guard(before: Any, after: Any, words: str) -> None:
    old = MultiSteps(SGD, 2, should_skip_update_fn=before)
    new = MultiSteps(SGD, 2, should_skip_update_fn=after)
    _, state = train(old, [1.0, 2.0])
    with pytest.raises(ValueError, match="`skip_state` was ") as error:
        new.update(grads_of(1.0), state)
    assert words in str(error.value)
    assert "`state._replace(skip_state=steps.init(params).skip_state)`" in str(error.value)
    changed = state._replace(skip_state=new.init(PARAMS).skip_state)
    _, changed = new.update(grads_of(1.0), changed)
    chex.assert_trees_all_equal_structs(changed, new.init(PARAMS))


# Outliers


def test_outliers_are_judged_by_what_was_accepted() -> None:
    said, state = decide(skip_outliers(3.0, warmup=3, decay=1.0), [1, 2, 3, 5, 60, 9, -10, 6])
    assert said == [False, False, False, False, True, True, True, False]
    assert float(state["mean_norm"]) == pytest.approx(norm_of((1 + 2 + 3 + 5 + 6) / 5), rel=1e-6)
    counts = ("num_accepted", "num_skipped", "num_consecutive")
    assert [int(state[name]) for name in counts] == [5, 3, 0]
    assert float(state["norm"]) == pytest.approx(norm_of(6), rel=1e-6)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_what_is_not_finite_is_an_outlier_even_in_the_warmup(value: float) -> None:
    guard = skip_outliers(3.0, warmup=5, max_consecutive=1)
    said, state = decide(guard, [value, value, 1.0, value])
    assert said == [True, True, False, True]
    assert float(state["mean_norm"]) == pytest.approx(norm_of(1.0), rel=1e-6)


def test_larger_gradients_for_good() -> None:
    values = [1.0, 1.0, 50.0, 50.0, 50.0, 50.0]
    assert decide(skip_outliers(3.0, warmup=1), values)[0] == [False, False, *[True] * 4]
    said, state = decide(skip_outliers(3.0, warmup=1, max_consecutive=2), values)
    assert said == [False, False, True, True, False, False]
    assert int(state["num_consecutive"]) == 0


# Combinations

LARGE = functools.partial(skip_large_updates, max_squared_norm=50.0)
COMBINED: list[tuple[Callable[..., Any], list[bool]]] = [
    (any_of, [False, True, True, True]),
    (all_of, [False, False, False, True]),
]


@pytest.mark.parametrize(("combine", "expected"), COMBINED)
def test_decisions_and_counts(combine: Callable[..., Any], expected: list[bool]) -> None:
    said, state = decide(combine(negative, LARGE), [1.0, -1.0, 9.0, -9.0])
    assert said == expected
    assert int(state["num_skipped"]) == sum(expected)
    assert [int(count) for count in state["num_by_function"]] == [2, 2]
    assert float(state["skip_states"][1]["norm_squared"]) == 162.0


def test_a_guard_forgets_what_the_others_decided() -> None:
    guard = skip_outliers(3.0, warmup=1)
    _, state = decide(any_of(negative, guard), [1.0, -2.0, 1.0, 70.0])
    inner = state["skip_states"][1]
    assert float(inner["mean_norm"]) == pytest.approx(norm_of(1.0), rel=1e-6)
    assert [int(inner[name]) for name in ("num_accepted", "num_skipped")] == [2, 1]
    _, state = decide(all_of(negative, guard), [1.0, 70.0])
    assert int(state["skip_states"][1]["num_skipped"]) == 0
    assert int(state["num_by_function"][1]) == 1


def test_combinations_in_multi_steps() -> None:
    skip = any_of(skip_not_finite, skip_outliers(3.0, warmup=1))
    steps = MultiSteps(SGD, 2, should_skip_update_fn=skip)
    added, state = train(steps, [1.0, jnp.nan, 2.0, 77.0, jnp.inf, 2.0, 4.0])
    assert added == [0.0, 0.0, -1.5, 0.0, 0.0, 0.0, -3.0]
    assert int(state.skip_state["num_skipped"]) == 3
    assert [int(count) for count in state.skip_state["num_by_function"]] == [2, 3]


def test_a_run_that_only_skips_is_stopped() -> None:
    guard = any_of(skip_not_finite, skip_outliers(3.0))
    steps = MultiSteps(SGD, 2, should_skip_update_fn=guard, window_means=("value",))
    state, update = steps.init(PARAMS), jax.jit(steps.update)
    for value, in_a_row in [(1.0, 0), (jnp.nan, 1), (jnp.inf, 2), (jnp.nan, 3), (1.0, 0)]:
        _, state = update(grads_of(value), state, PARAMS, value=value)
        check_skips(state, in_a_row)
        if in_a_row:
            with pytest.raises(errors.StuckError, match=f"^{in_a_row} mini-steps in a row were"):
                check_skips({"inside": (state,)}, in_a_row - 1)
