"""`rollback`: what it holds, where, and what it gives back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import Spike, guard, report, rollback, with_average

TX = guard(with_average(optax.adam(0.1), 0.9), loss=Spike(warmup=2), max_consecutive=2)
KINDS = ["pinned_host", None]


@jax.jit
def step(params: Any, state: Any, loss: Any) -> Any:
    return TX.apply(params, state, {"w": jnp.cos(params["w"])}, loss=loss)


donating = jax.jit(step, donate_argnums=(0, 1))


def start() -> Any:
    params = {"w": jnp.arange(4.0)}
    return params, TX.init(params)


def as_bytes(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_states_come_back_bit_for_bit(kind: str | None) -> None:
    good, carried, seen = rollback(keep=2, memory_kind=kind), start(), {}
    for number in range(4):
        carried = donating(*carried, 1.0)
        assert good.take(number, carried)
        seen[number] = as_bytes(carried)
    assert list(good.steps) == [2, 3]
    number, restored = good.restore()
    assert (number, as_bytes(restored)) == (3, seen[3])
    assert list(good.steps) == [2]
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(carried), strict=True):
        assert leaf.sharding == other.sharding
        assert leaf.unsafe_buffer_pointer() != other.unsafe_buffer_pointer()
    donating(*restored, 1.0)  # what is held does not go with it
    for _ in range(2):
        number, restored = good.restore()
        assert (number, as_bytes(restored)) == (2, seen[2])
        donating(*restored, 1.0)


def test_they_are_held_on_the_host() -> None:
    good = rollback()
    good.take(0, start())
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(good._held[0].tree)}
    assert kinds == {"pinned_host"}


@pytest.mark.slow
def test_a_skipped_step_is_not_taken_and_a_stuck_run_goes_back() -> None:
    good, carried, taken = rollback(keep=3), start(), []
    for number, loss in enumerate([1.0, 1.0, 1.0, jnp.nan, 1.0, jnp.nan, jnp.nan]):
        carried = step(*carried, loss)
        taken.append(good.take(number, carried))
        if number == 4:
            last_good = as_bytes(carried)
    assert taken == [True, True, True, False, True, False, False]
    assert bool(report(carried[1]).stuck)
    number, restored = good.restore()
    assert (number, as_bytes(restored)) == (4, last_good)
    assert not bool(report(restored[1]).stuck)


def test_a_numpy_array_that_changes_later_does_not_change_what_is_held() -> None:
    good, array = rollback(), np.zeros(2)
    good.take(0, array)
    array += 1
    assert good.restore()[1].tolist() == [0, 0]


def test_anything_can_be_held() -> None:
    good, tree = rollback(), {"key": jax.random.key(3), "number": 3, "array": np.arange(3)}
    assert good.take(7, tree)  # without a guard every state is good
    number, found = good.restore()
    assert (number, found["number"]) == (7, 3)
    np.testing.assert_array_equal(found["array"], tree["array"])
    assert (found["key"] == tree["key"]).all()
