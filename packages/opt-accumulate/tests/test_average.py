"""`with_average`: its numbers, and the steps that leave it alone."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import MultiSteps, guard, skip_not_finite, with_average

PARAMS: Any = {"w": jnp.array([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]]), "b": jnp.array([0.5, -0.5])}
STEPS = 40


def gradient(step: int) -> Any:
    return jax.tree.map(lambda p: jnp.cos(3 * p + step), PARAMS)


def trajectory(tx: Any, steps: int = STEPS, params: Any = PARAMS) -> tuple[list[Any], Any]:
    """The parameters after each update, as float64, and the last state."""
    state, found = tx.init(params), []
    apply = jax.jit(tx.apply)
    for step in range(steps):
        params, state = apply(params, state, gradient(step))
        found.append(jax.tree.map(lambda p: np.asarray(p, np.float64), params))
    return found, state


def averaged(params: list[Any], decay: Any) -> Any:
    """AXLearn's `param_ema` and TensorFlow's `ExponentialMovingAverage`, from a copy."""
    average = jax.tree.map(lambda p: np.asarray(p, np.float64), PARAMS)
    for step, new in enumerate(params):
        d = decay(step)
        average = jax.tree.map(lambda a, p, d=d: (1 - d) * p + d * a, average, new)
    return average


def assert_close(found: Any, expected: Any, tolerance: float = 1e-7) -> None:
    """Relative to the largest value: rounding of float32 is 6e-8 of each."""
    chex.assert_trees_all_equal_structs(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        largest = np.abs(b).max()
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=tolerance * largest)


def fading(t: Any) -> Any:
    return 1 - 1 / (t + 2)


ADAM = optax.adam(0.05)


@pytest.mark.parametrize("decay", [0.999, 0.0])
def test_warm_up_is_tensorflows_formula(decay: float) -> None:
    params, state = trajectory(with_average(ADAM, decay, warmup=True))
    assert_close(state.average, averaged(params, lambda n: min(decay, (1 + n) / (10 + n))))


def test_a_schedule_is_asked_for_the_number_of_the_average() -> None:
    params, state = trajectory(with_average(ADAM, fading))
    assert_close(state.average, averaged(params, fading), 2e-7)


@pytest.mark.parametrize(
    ("form", "start", "every"),
    [("ema", 0, 1), ("polyak", 0, 1), ("ema", 7, 3), ("polyak", 7, 3), ("ema", 100, 4)],
)
def test_form_start_and_every(form: Any, start: int, every: int) -> None:
    decay = 0.8 if form == "ema" else None
    params, state = trajectory(with_average(ADAM, decay, start=start, every=every, form=form))
    counted = [p for n, p in enumerate(params) if n >= start and (n - start) % every == 0]
    before = params[start - 1] if 0 < start <= STEPS else params[-1] if start else PARAMS
    average = jax.tree.map(lambda p: np.asarray(p, np.float64), before)
    for t, new in enumerate(counted):
        d = 0.8 if form == "ema" else t / (t + 1)
        average = jax.tree.map(lambda a, p, d=d: d * a + (1 - d) * p, average, new)
    assert_close(state.average, average, 3e-7)
    if start > STEPS:
        chex.assert_trees_all_equal(state.average, jax.tree.map(np.float32, params[-1]))


def test_bfloat16_parameters_are_averaged_as_they_are_rounded() -> None:
    """In bfloat16 the average would not move: a step is below half of a digit."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    found, state = trajectory(with_average(optax.sgd(1e-2), 0.999), 100, params)
    assert_close(state.average, averaged(found, lambda _: 0.999), 1e-3 * 1e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.average)} == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_wide_and_complex_parameters_stay_wide() -> None:
    enable_x64: Any = jax.enable_x64
    with enable_x64(True):
        params = {"a": jnp.ones(2, jnp.float64), "b": jnp.ones(2, jnp.complex64)}
        tx = with_average(optax.sgd(0.1), 0.5, warmup=True)
        _, state = tx.apply(params, tx.init(params), params)
        found = [str(leaf.dtype) for leaf in jax.tree.leaves(state.average)]
        assert found == ["float64", "complex64"]
        wide = with_average(optax.sgd(0.1), 0.5, dtype=jnp.float64).init(PARAMS)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(wide.average)} == {"float64"}


@pytest.mark.parametrize("select", [{"w": True, "b": False}, lambda p: {"w": True, "b": False}])
def test_what_is_not_selected_takes_no_memory(select: Any) -> None:
    params, state = trajectory(with_average(ADAM, 0.9, select=select))
    assert isinstance(state.average["b"], optax.MaskedNode)
    assert_close(state.average["w"], averaged(params, lambda step: 0.9)["w"])


# Steps that are none


@pytest.mark.sample(1)
@pytest.mark.parametrize("steps", [MultiSteps, optax.MultiSteps])
@pytest.mark.parametrize("chained", [False, True])
def test_only_emitting_mini_steps_count(steps: Any, chained: bool) -> None:
    windows: Any = steps(ADAM, 2)
    if chained:
        windows = optax.chain(optax.identity(), windows.gradient_transformation())
    tx = with_average(windows, 0.5)
    params, state = trajectory(tx, 6)
    assert int(state.count) == 3
    assert_close(state.average, averaged(params[1::2], lambda step: 0.5), 2e-7)


@pytest.mark.slow
def test_a_skipped_mini_step_does_not_count() -> None:
    tx = with_average(MultiSteps(ADAM, 1, should_skip_update_fn=skip_not_finite), 0.5)
    params, state = tx.apply(PARAMS, tx.init(PARAMS), gradient(0))
    bad = jax.tree.map(lambda g: g * jnp.nan, gradient(1))
    after, skipped = tx.apply(params, state, bad)
    chex.assert_trees_all_equal(
        (after, skipped.average, skipped.count), (params, state.average, state.count)
    )


# What a state promises


def test_it_shares_no_buffer_and_can_be_donated() -> None:
    tx = guard(with_average(ADAM, 0.9), loss=None)
    params = jax.tree.map(jnp.copy, PARAMS)
    for state in (tx.init(params), jax.jit(tx.init)(params)):
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state))]
        assert len(set(pointers)) == len(pointers)
    step = jax.jit(tx.apply, donate_argnums=(0, 1))
    for index in range(3):
        params, state = step(params, state, gradient(index))
    chex.assert_tree_all_finite((params, state))


def test_integers_are_not_averaged() -> None:
    tx = with_average(optax.identity(), 0.9)
    params = {"w": jnp.ones(2), "steps": jnp.int32(3)}
    state = tx.init(params)
    assert isinstance(state.average["steps"], optax.MaskedNode)
    updates = {"w": jnp.ones(2), "steps": jnp.int32(1)}
    params, state = tx.apply(params, state, updates)
    assert params["steps"] == 4
    np.testing.assert_allclose(state.average["w"], 1.1, rtol=1e-6)
