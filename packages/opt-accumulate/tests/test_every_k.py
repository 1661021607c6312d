"""What `every_k_schedule` may be, what it means, and what is said of anything else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import MultiSteps

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


INTEGERS = [3, np.int64(3), np.array(3), jnp.uint32(3)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("k", INTEGERS, ids=lambda k: type(k).__name__ + str(np.asarray(k).dtype))
def test_integers_of_every_kind(k: Any) -> None:
    assert emissions(MultiSteps(optax.sgd(1.0), k), 7) == [2, 5]


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [0, 1.9, np.int64(1), jnp.float32(-jnp.inf)])
def test_values_of_a_schedule_are_cut_to_integers_and_at_least_one(value: Any) -> None:
    assert emissions(MultiSteps(optax.sgd(1.0), lambda step: value), 3) == [0, 1, 2]


def test_a_full_window_emits_at_once_under_a_smaller_k() -> None:
    steps = MultiSteps(optax.sgd(1.0), 8)
    state = steps.init(PARAMS)
    for _ in range(5):
        _, state = steps.update(GRADS, state, PARAMS)
    assert emissions(MultiSteps(optax.sgd(1.0), 3), 4, state) == [0, 3]
    updates, _ = MultiSteps(optax.sgd(1.0), 1).update(GRADS, state, PARAMS)
    np.testing.assert_array_equal(updates, -GRADS)  # the mean of six
