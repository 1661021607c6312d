"""`eval_params`: the one answer, wherever it is, and no answer where there are two."""

import importlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from opt_accumulate import (
    MultiSteps,
    eval_params,
    guard,
    with_average,
)
from opt_accumulate.errors import EvaluationError

contrib: Any = importlib.import_module("optax.contrib")  # much of it is not exported explicitly
PARAMS: Any = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.array([0.5, -0.5])}
ADAM = optax.adam(0.05)
LABELS = {"w": "w", "b": "b"}


def trained(tx: Any, params: Any = PARAMS, steps: int = 3) -> tuple[Any, Any]:
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(steps):
        grads = jax.tree.map(lambda p, step=step: jnp.cos(3 * p + step), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


AVERAGED = with_average(ADAM, 0.5)
NESTED = {
    "alone": AVERAGED,
    "chain": optax.chain(optax.clip(1.0), AVERAGED),
    "window": MultiSteps(AVERAGED, 1),
    "around a window": with_average(MultiSteps(ADAM, 1), 0.5),
    "guard": guard(AVERAGED, loss=None),
    "injected": optax.inject_hyperparams(lambda b1: with_average(optax.adam(0.05, b1), 0.5))(
        b1=0.9
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("nesting", NESTED)
def test_an_average_is_found_in_any_nesting(nesting: str) -> None:
    expected_params, state = trained(AVERAGED)
    params, nested = trained(NESTED[nesting])
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    chex.assert_trees_all_close(params, expected_params, **tolerance)
    chex.assert_trees_all_close(eval_params(nested, params), state.average, **tolerance)
    chex.assert_trees_all_close(jax.jit(eval_params)(nested, params), state.average, **tolerance)


def test_it_has_the_dtypes_of_the_parameters() -> None:
    params, state = trained(
        AVERAGED, jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS), steps=1
    )
    found = eval_params(state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, params)
    chex.assert_trees_all_close(found, state.average, rtol=2**-8)


def test_without_a_provider_it_is_the_parameters() -> None:
    params, state = trained(ADAM)
    assert eval_params(state, params)["w"] is params["w"]


def test_schedule_free_of_a_part() -> None:
    free = contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9)
    tx = optax.partition({"w": free, "b": optax.sgd(0.1)}, LABELS)
    params, state = trained(tx)
    alone_params, alone = trained(free, {"w": PARAMS["w"]})
    expected = contrib.schedule_free_eval_params(alone, alone_params)
    found = eval_params(state, params)
    chex.assert_trees_all_close(found["w"], expected["w"])
    chex.assert_trees_all_equal(found["b"], params["b"])


def test_lookahead_has_slow_parameters() -> None:
    tx = optax.lookahead(optax.sgd(0.1), sync_period=5, slow_step_size=0.5)
    params: Any = optax.LookaheadParams.init_synced(PARAMS)
    state = tx.init(params)
    updates, state = tx.update(PARAMS, state, params)
    params = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(eval_params(state, params), PARAMS)
    averaged = with_average(tx, 0.9).init(params)
    with pytest.raises(
        EvaluationError, match=r"the slow parameters and the `AverageState` at `\.` both"
    ):
        eval_params(averaged, params)


def test_what_is_not_selected_is_the_parameter() -> None:
    params, state = trained(with_average(ADAM, 0.5, select={"w": False, "b": True}))
    found = eval_params(state, params)
    chex.assert_trees_all_equal(found["w"], params["w"])
    chex.assert_trees_all_equal(found["b"], state.average["b"])


def test_two_are_an_error_that_names_both() -> None:
    params, state = trained(with_average(guard(AVERAGED, loss=None), 0.9), steps=0)
    with pytest.raises(
        EvaluationError,
        match=r"the `AverageState` at `\.` and the `AverageState` at `inner/inner` both provide "
        r"parameters to evaluate of `b`",
    ):
        eval_params(state, params)
    free = contrib.schedule_free(optax.sgd(0.1), 0.1)
    params, state = trained(with_average(free, 0.9), steps=0)
    with pytest.raises(EvaluationError, match="the `ScheduleFreeState` at `inner`"):
        eval_params(state, params)


def test_parameters_of_another_model_are_an_error() -> None:
    _, state = trained(AVERAGED)
    with pytest.raises(EvaluationError, match=r"the `AverageState` at `\.` of `state` has `b`"):
        eval_params(state, {"w": PARAMS["w"]})


class Master(NamedTuple):
    """A state of another package, which imports nothing of this one."""

    held: Any

    def master_params(self, params: Any) -> Any:
        return jax.tree.map(lambda p, m: m if p.ndim else p, params, self.held)


def test_a_master_copy_is_taken_where_there_is_no_average() -> None:
    params = {"w": jnp.ones(2)}
    master = Master({"w": jnp.full(2, 1.25)})
    chex.assert_trees_all_equal(eval_params([master], params), {"w": jnp.full(2, 1.25)})
    _, state = trained(AVERAGED, params)
    chex.assert_trees_all_equal(eval_params([master, state], params), state.average)
