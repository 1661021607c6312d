"""Skip functions: Optax's two where Optax is wrong, and what one of a user may return."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import MultiSteps, skip_large_updates, skip_not_finite

PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(())}
SGD = optax.sgd(1.0)


def grads_of(value: Any) -> Any:
    return {"w": jnp.full(2, value, jnp.float32), "b": jnp.zeros(())}


def train(steps: Any, values: list[Any], state: Any = None) -> tuple[list[float], Any]:
    first = steps.init(PARAMS)
    state, added = first if state is None else state, []
    update = jax.jit(steps.update)
    for value in values:
        updates, state = update(grads_of(value), state, PARAMS)
        added.append(float(updates["w"][0]))
    if isinstance(steps, MultiSteps):
        chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
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


@pytest.mark.parametrize("answer", [True, np.bool_(True), jnp.array(True)])
def test_booleans_of_every_kind(answer: Any) -> None:
    steps = MultiSteps(SGD, 1, should_skip_update_fn=lambda *_: (answer, {"seen": jnp.int32(1)}))
    added, state = train(steps, [1.0])
    assert added == [0.0]
    assert int(state.skip_state["skip_state"]["seen"]) == 1


def test_the_state_of_a_skip_function_that_is_gone() -> None:
    steps = MultiSteps(SGD, 2)
    _, state = train(MultiSteps(SGD, 2, should_skip_update_fn=skip_not_finite), [1.0, 2.0])
    with pytest.raises(ValueError, match="`skip_state` was made with") as error:
        steps.update(grads_of(1.0), state)
    assert "`state._replace(skip_state=steps.init(params).skip_state)`" in str(error.value)
    changed = state._replace(skip_state=steps.init(PARAMS).skip_state)
    _, changed = steps.update(grads_of(1.0), changed)
    chex.assert_trees_all_equal_structs(changed, steps.init(PARAMS))
