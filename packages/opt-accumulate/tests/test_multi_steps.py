"""Where `MultiSteps` must be better than Optax's: each test shows what Optax does beside it."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import MultiSteps, skip_large_updates, skip_not_finite

BOTH = pytest.mark.parametrize("kind", [MultiSteps, optax.MultiSteps])
PARAMS = {"a": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}
SGD = optax.sgd(1.0)


def grads_of(value: float) -> Any:
    return jax.tree.map(lambda p: jnp.full_like(p, value), PARAMS)


def run(steps: Any, values: list[float], state: Any = None) -> tuple[list[float], Any]:
    """Returns what was added to `b` on each mini-step, and the state."""
    state = steps.init(PARAMS) if state is None else state
    update, added = jax.jit(steps.update), []
    for value in values:
        updates, state = update(grads_of(value), state, PARAMS)
        added.append(float(updates["b"]))
    return added, state


def applied(steps: MultiSteps, state: Any, params: Any, values: list[float]) -> Any:
    apply = jax.jit(steps.apply)
    for value in values:
        params, state = apply(params, state, grads_of(value))
    return params, state


# No wasted work


@BOTH
def test_the_inner_optimizer_runs_only_to_emit(kind: Any) -> None:
    calls = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return updates, state

    counting = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    run(kind(counting, 4), [1.0] * 8)
    jax.effects_barrier()
    assert len(calls) == (2 if kind is MultiSteps else 8)


def test_apply_is_update_and_addition() -> None:
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    steps = MultiSteps(inner, 3, should_skip_update_fn=skip_not_finite)
    params: Any = PARAMS
    state: Any = steps.init(PARAMS)
    update = jax.jit(steps.update)
    for value in (1.0, jnp.nan, 2.0, 3.0, 4.0):
        updates, state = update(grads_of(value), state, params)
        params = optax.apply_updates(params, updates)
    found = applied(steps, steps.init(PARAMS), PARAMS, [1.0, jnp.nan, 2.0, 3.0, 4.0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, (params, state))
    assert int(state.mini_step) == 1
    assert int(state.gradient_step) == 1


# Non-finite values


@pytest.mark.sample(1)
@pytest.mark.parametrize(("bad", "position"), [(jnp.inf, 0), (jnp.nan, 0), (-jnp.inf, 1)])
@pytest.mark.parametrize("mean", [True, False])
def test_the_damage_ends_at_its_own_emission(mean: bool, bad: float, position: int) -> None:
    values = [1.0, 1.0, 3.0, 5.0]
    values[position] = bad
    added, state = run(MultiSteps(SGD, 2, mean), values)
    assert added[0] == added[2] == 0.0
    assert not np.isfinite(added[1])
    assert added[3] == (-4.0 if mean else -8.0)
    for leaf in jax.tree.leaves(state.acc_grads):
        np.testing.assert_array_equal(leaf, 0.0)


@BOTH
def test_a_bad_mini_step_that_is_skipped_never_happened(kind: Any) -> None:
    steps = kind(SGD, 2, should_skip_update_fn=skip_not_finite)
    assert run(steps, [1.0, jnp.nan, 3.0, jnp.inf, 1.0, 1.0])[0] == [0, 0, -2.0, 0, 0, -1.0]


def test_inner_updates_do_not_leak_before_the_emission() -> None:
    inner = optax.sgd(lambda count: 1 / count)  # the first step is bad, nothing before it
    assert run(MultiSteps(inner, 2), [1.0] * 4)[0] == [0, -jnp.inf, 0, -1]


# has_updated


@pytest.mark.sample(1)
@pytest.mark.parametrize("transform", ["update", "apply"])
def test_has_updated_after_a_skipped_mini_step(transform: str) -> None:
    steps = MultiSteps(SGD, 2, should_skip_update_fn=skip_not_finite)
    state, params, read = steps.init(PARAMS), PARAMS, []
    apply, update = jax.jit(steps.apply), jax.jit(steps.update)
    assert not steps.has_updated(state)
    for value in (1.0, 1.0, jnp.nan, jnp.nan, 1.0, 1.0):
        if transform == "apply":
            params, state = apply(params, state, grads_of(value))
        else:
            _, state = update(grads_of(value), state, params)
        read.append(bool(steps.has_updated(state)))
    assert read == [False, True, False, False, False, True]


# Extra arguments


def takes_value() -> optax.GradientTransformationExtraArgs:
    """Adds the value that it is given."""

    def update(updates: Any, state: Any, params: Any = None, *, value: Any = -1.0) -> Any:
        del params
        return jax.tree.map(lambda u: jnp.full_like(u, value), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def in_chain(steps: Any) -> Any:
    return optax.chain(optax.clip(1.0), steps.gradient_transformation(), optax.scale(2.0))


@BOTH
def test_extra_arguments_pass_a_chain(kind: Any) -> None:
    tx = in_chain(kind(takes_value(), 2))
    state, added = tx.init(PARAMS), []
    update = jax.jit(lambda g, s, v: tx.update(g, s, PARAMS, value=v))
    for value in (5.0, 7.0, 9.0, 11.0):
        updates, state = update(grads_of(1.0), state, value)
        added.append(float(updates["b"]))
    dropped = [0.0, -2.0, 0.0, -2.0]
    assert added == ([0.0, 14.0, 0.0, 22.0] if kind is MultiSteps else dropped)


# flush


@pytest.mark.sample(1)
@pytest.mark.parametrize("mean", [True, False])
def test_flush_emits_what_the_window_holds(mean: bool) -> None:
    steps = MultiSteps(SGD, 4, mean, should_skip_update_fn=skip_not_finite)
    _, state = run(steps, [1.0, 3.0, jnp.nan])
    assert not steps.has_updated(state)
    updates, flushed = jax.jit(steps.flush)(state, PARAMS)
    assert float(updates["b"]) == (-2.0 if mean else -4.0)
    assert steps.has_updated(flushed)
    assert (int(flushed.mini_step), int(flushed.gradient_step)) == (0, 1)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(flushed.acc_grads))
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.dtype, a.shape), (b.dtype, b.shape)), state, flushed
    )
    assert run(steps, [1.0] * 4, flushed)[0] == [0, 0, 0, -1.0 if mean else -4.0]


def test_flush_leaves_an_empty_window_alone() -> None:
    steps = MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=skip_not_finite)
    _, state = run(steps, [1.0, 1.0, jnp.nan])
    updates, flushed = jax.jit(steps.flush)(state, PARAMS)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, flushed, state)


# dtypes


def test_64_bfloat16_gradients_reach_the_inner_optimizer_in_float32() -> None:
    params = {"a": jnp.zeros(256, jnp.bfloat16)}
    last: Any = optax.GradientTransformation(  # whose state is what it saw
        lambda params: optax.tree.cast(params, jnp.float32), lambda grads, *_: (grads, grads)
    )
    grads = jax.random.uniform(jax.random.key(0), (64, 256), jnp.bfloat16, 0.5, 1.5)
    steps = MultiSteps(last, 64)
    state, update = steps.init(params), jax.jit(steps.update)
    for grad in grads:
        updates, state = update({"a": grad}, state, params)
    exact = np.asarray(grads, np.float64).mean(axis=0)
    np.testing.assert_allclose(state.inner_opt_state["a"], exact, rtol=1e-6)
    assert updates["a"].dtype == jnp.bfloat16


def test_complex_gradients_keep_their_imaginary_parts() -> None:
    params = {"z": jnp.zeros(1, jnp.complex64)}
    grads = {"z": jnp.array([1 + 2j], jnp.complex64)}
    for of_optax in (False, True):  # whose accumulator is real
        steps = MultiSteps(SGD, 2)
        state: Any = (optax.MultiSteps(SGD, 2) if of_optax else steps).init(params)
        _, state = steps.update(grads, state)
        updates: Any = steps.update(grads, state)[0]
        assert updates["z"].tolist() == [-1 - 2j]


DTYPES = [  # parameters, `accumulator_dtype`, accumulator
    (jnp.bfloat16, jnp.float32, jnp.float32),
    (jnp.float16, None, jnp.float16),
    (jnp.float32, None, jnp.float32),
    (jnp.float32, jnp.bfloat16, jnp.bfloat16),
    (jnp.complex64, jnp.bfloat16, jnp.complex64),
    (jnp.complex64, None, jnp.complex64),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "asked", "expected"), DTYPES)
def test_dtypes_of_the_accumulator(dtype: Any, asked: Any, expected: Any) -> None:
    params = {"a": jnp.ones((2, 3), dtype), "b": jnp.ones((), dtype)}
    inner = optax.adam(optax.linear_schedule(0.1, 0.2, 3))
    steps = MultiSteps(inner, 2, accumulator_dtype=asked)
    state = steps.init(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.acc_grads)} == {np.dtype(expected)}
    describe = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype, x.weak_type))
    for _ in range(3):
        updates, new = jax.jit(steps.update)(params, state, params)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {np.dtype(dtype)}
        assert describe(new) == describe(state)
        moved, applied = jax.jit(steps.apply)(params, state, params)
        assert describe((moved, applied)) == describe((params, state))
        state = new


# Buffers


def test_init_shares_no_buffer_however_the_inner_state_is_made() -> None:
    """An inner optimizer that keeps the parameters twice, as they are and as a shard of them."""
    params = {"w": jnp.arange(3.0)}
    keeping = optax.GradientTransformation(
        lambda params: (params, jax.tree.map(lambda x: x.addressable_shards[0].data, params)),
        lambda updates, state, params=None: (updates, state),
    )
    state = MultiSteps(keeping, 2).init(params)
    touch = jax.jit(lambda *trees: jax.tree.map(lambda x: x + 1, trees), donate_argnums=(0, 1))
    new_params, new_state = touch(params, state)
    for kept in (new_params, *new_state.inner_opt_state):
        assert kept["w"].tolist() == [1.0, 2.0, 3.0]


def test_an_inner_optimizer_that_wants_one_dtype_is_called_once() -> None:
    calls = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        calls.append(1)
        return jax.tree.map(jax.lax.add, updates, state), state

    strict = optax.GradientTransformation(lambda params: params, update)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    steps = MultiSteps(strict, 1)
    with pytest.raises(TypeError, match="same dtypes") as error:
        steps.apply(params, steps.init(params), params)
    assert "`accumulator_dtype=None` to accumulate in theirs" in error.value.__notes__[0]
    assert len(calls) == 1
    in_theirs = MultiSteps(strict, 1, accumulator_dtype=None)
    in_theirs.update(params, in_theirs.init(params), params)


# What `every_k_schedule` may be


def emissions(k: Any, number: int, state: Any = None) -> list[int]:
    """Returns the mini-steps that emitted."""
    added, _ = run(MultiSteps(SGD, k), [1.0] * number, state)
    return [index for index, update in enumerate(added) if update]


@pytest.mark.parametrize("k", [np.int64(3), jnp.uint32(3)])
def test_integers_of_every_kind(k: Any) -> None:
    assert emissions(k, 7) == [2, 5]


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [0, 1.9, np.int64(1), jnp.float32(-jnp.inf)])
def test_values_of_a_schedule_are_cut_to_integers_and_at_least_one(value: Any) -> None:
    assert emissions(lambda step: value, 3) == [0, 1, 2]


def test_a_full_window_emits_at_once_under_a_smaller_k() -> None:
    _, state = run(MultiSteps(SGD, 8), [1.0] * 5)
    assert emissions(3, 4, state) == [0, 3]
    assert run(MultiSteps(SGD, 1), [4.0], state)[0] == [-1.5]  # the mean of six


# Skip functions: Optax's two where Optax is wrong, and what one of a user may return


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan, complex(0, np.inf), complex(np.nan)])
def test_every_element_that_is_not_finite_counts(value: Any) -> None:
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


def test_the_state_of_a_skip_function_that_is_gone() -> None:
    steps = MultiSteps(SGD, 2)
    _, state = run(MultiSteps(SGD, 2, should_skip_update_fn=skip_not_finite), [1.0, 2.0])
    with pytest.raises(ValueError, match="`skip_state` was made with") as error:
        steps.update(grads_of(1.0), state)
    assert "`state._replace(skip_state=steps.init(params).skip_state)`" in str(error.value)
    changed = state._replace(skip_state=steps.init(PARAMS).skip_state)
    _, changed = steps.update(grads_of(1.0), changed)
    chex.assert_trees_all_equal_structs(changed, steps.init(PARAMS))


def negative(updates: Any, gradient_step: Any, params: Any) -> tuple[Any, Any]:
    return updates["b"] < 0, ()


@pytest.mark.slow
def test_the_decision_is_kept_where_the_function_does_not_keep_it() -> None:
    steps = MultiSteps(SGD, 2, should_skip_update_fn=negative)
    added, state = run(steps, [1.0, 1.0, -1.0])
    assert added == [0.0, -1.0, 0.0]
    assert bool(state.skip_state["should_skip"])
    assert not steps.has_updated(state)
    theirs = optax.MultiSteps(SGD, 2, should_skip_update_fn=negative)
    _, their_state = run(theirs, [1.0, 1.0, -1.0])
    assert their_state.skip_state == ()
    assert theirs.has_updated(their_state)
    added, _ = run(steps, [3.0, 5.0], their_state)
    assert added == [0.0, -4.0]
    added, _ = run(theirs, [3.0, 5.0], state)
    assert added == [0.0, -4.0]
