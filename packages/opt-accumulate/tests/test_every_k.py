"""What `every_k_schedule` may be, what it means, and what is said of anything else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate._multi_steps.every_k import parse_every_k
from opt_accumulate._multi_steps.multi_steps import MultiSteps

PARAMS = jnp.zeros(2)
GRADS = jnp.array([1.0, 3.0])


def emissions(steps: Any, number: int, state: Any = None) -> list[int]:
    """Returns the mini-steps that changed the parameters."""
    state = steps.init(PARAMS) if state is None else state
    update, emitted = jax.jit(steps.update), []
    for index in range(number):
        updates, state = update(GRADS, state, PARAMS)
        assert bool(steps.has_updated(state)) == bool(jnp.any(updates != 0))
        if jnp.any(updates != 0):
            emitted.append(index)
    return emitted


INTEGERS = [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3), jnp.uint32(3)]


@pytest.mark.parametrize("k", INTEGERS, ids=lambda k: type(k).__name__ + str(np.asarray(k).dtype))
def test_integers_of_every_kind(k: Any) -> None:
    assert emissions(MultiSteps(optax.sgd(1.0), k), 7) == [2, 5]
    if not isinstance(k, int):
        steps = optax.MultiSteps(optax.sgd(1.0), k)
        with pytest.raises(TypeError, match="not callable"):
            steps.update(GRADS, steps.init(PARAMS), PARAMS)


@pytest.mark.parametrize("k", [0, -1, np.int64(0), jnp.int32(-4)])
def test_what_would_never_update_is_an_error(k: Any) -> None:
    with pytest.raises(ValueError, match=r"`every_k_schedule` must be at least 1, found (0|-1|-4)"):
        MultiSteps(optax.sgd(1.0), k)


@pytest.mark.parametrize("k", [2**31, np.int64(2**40)])
def test_what_does_not_fit_the_counter_is_an_error(k: Any) -> None:
    with pytest.raises(
        ValueError, match=r"`every_k_schedule` must be an int32, at most 2147483647"
    ):
        MultiSteps(optax.sgd(1.0), k)


@pytest.mark.parametrize("k", [0, -1])
def test_optax_never_updates_and_says_nothing(k: int) -> None:
    assert emissions_of_optax(k) == []


def emissions_of_optax(k: Any) -> list[int]:
    steps = optax.MultiSteps(optax.sgd(1.0), k)
    state, emitted = steps.init(PARAMS), []
    for index in range(5):
        updates, state = steps.update(GRADS, state, PARAMS)
        if jnp.any(updates != 0):
            emitted.append(index)
    return emitted


@pytest.mark.parametrize("k", [True, 4.0, "4", None, np.float32(4), jnp.float32(4), np.bool_(True)])
def test_other_types_are_an_error(k: Any) -> None:
    with pytest.raises(TypeError, match=r"`every_k_schedule` must be an integer or a function"):
        MultiSteps(optax.sgd(1.0), k)


@pytest.mark.parametrize("k", [np.array([4]), jnp.array([1, 2])])
def test_arrays_are_an_error(k: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a scalar, found an array of shape \([12],\)"):
        MultiSteps(optax.sgd(1.0), k)


def test_a_schedule_that_returns_an_array_is_an_error() -> None:
    steps = MultiSteps(optax.sgd(1.0), lambda step: jnp.array([2]))
    with pytest.raises(ValueError, match=r"must return a scalar, found an array of shape \(1,\)"):
        steps.update(GRADS, steps.init(PARAMS), PARAMS)


@pytest.mark.parametrize("value", [0, -3, 0.5, 1.9, np.int64(1), jnp.float32(-jnp.inf)])
def test_values_of_a_schedule_are_cut_to_integers_and_at_least_one(value: Any) -> None:
    assert emissions(MultiSteps(optax.sgd(1.0), lambda step: value), 3) == [0, 1, 2]


def test_a_schedule_is_asked_at_the_steps_made() -> None:
    ks = jnp.array([1, 1, 3, 3, 2, 2])
    found = emissions(MultiSteps(optax.sgd(1.0), lambda step: ks[step]), 12)
    assert found == [0, 1, 4, 7, 9, 11]


def test_a_schedule_of_floats_is_cut() -> None:
    steps = MultiSteps(optax.sgd(1.0), optax.linear_schedule(1.0, 4.0, 6))  # 1, 1.5, 2, 2.5, 3
    assert emissions(steps, 9) == [0, 1, 3, 5, 8]


def test_a_number_that_is_traced() -> None:
    @jax.jit
    def run(k: jax.Array) -> jax.Array:
        steps = MultiSteps(optax.sgd(1.0), k)

        def mini_step(state: Any, _: None) -> Any:
            _, state = steps.update(GRADS, state, PARAMS)
            return state, steps.has_updated(state)

        updated: jax.Array = jax.lax.scan(mini_step, steps.init(PARAMS), None, length=6)[1]
        return updated

    assert run(jnp.int32(3)).tolist() == [False, False, True] * 2
    assert run(jnp.int32(-2)).tolist() == [True] * 6


def test_a_full_window_emits_at_once_under_a_smaller_k() -> None:
    steps = MultiSteps(optax.sgd(1.0), 8)
    state = steps.init(PARAMS)
    for _ in range(5):
        _, state = steps.update(GRADS, state, PARAMS)
    assert emissions(MultiSteps(optax.sgd(1.0), 3), 4, state) == [0, 3]
    updates, _ = MultiSteps(optax.sgd(1.0), 1).update(GRADS, state, PARAMS)
    np.testing.assert_array_equal(updates, -GRADS)  # the mean of six

    theirs, emitted = optax.MultiSteps(optax.sgd(1.0), 3), []
    for index in range(4):
        updates, state = theirs.update(GRADS, state, PARAMS)
        if jnp.any(updates != 0):
            emitted.append(index)
    assert emitted == [3]  # 5 counts as an index modulo 3 there


def test_parsing_keeps_numbers_static() -> None:
    assert parse_every_k(np.int16(7)) == 7
    assert type(parse_every_k(jnp.int32(7))) is int
