"""Definitions as Optax transformations."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
import pytest
from bridge_testing import assert_close, assert_same_bits, jitted_once, loss, make_params
from flax.training.train_state import TrainState
from opt_core import (
    MultiOptimizer,
    OptimizerDef,
    OptimizerState,
    describe_state,
    increment_step,
)
from opt_core.errors import HyperParamError
from opt_optax_bridge import OptaxWrapper, as_transformation

pytestmark = pytest.mark.usefixtures("optax_promotion")


class Halves(OptimizerDef):
    """Returns parameters, as Adafactor does."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), ())

    def apply_gradient(self, hyper_params: Any, params: Any, state: Any, grads: Any) -> Any:
        new = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        return new, state.replace(step=increment_step(state.step))


def groups(**options: Any) -> MultiOptimizer:
    rules = [("w", "w", opt.adamw(0.1)), ("b", "b", opt.sgd(0.5))]
    return MultiOptimizer.from_rules(rules, **options)


def run(tx: Any, params: Any, steps: int = 1, **extra_args: Any) -> Any:
    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(loss)(params), state, params, **extra_args)
        params = optax.apply_updates(params, updates)
    return params, state


def run_optimizer(definition: Any, steps: int = 1, **overrides: Any) -> Any:
    optimizer = definition.create(make_params())
    for _ in range(steps):
        grads = jax.grad(loss)(optimizer.target)
        optimizer = optimizer.apply_gradient(grads, **overrides)
    return optimizer


@pytest.mark.parametrize("make", [lambda: opt.adamw(0.1), groups, lambda: Halves(None)])
def test_it_does_what_the_definition_does(make: Any) -> None:
    params, state = run(as_transformation(make()), make_params())
    expected = run_optimizer(make())
    if isinstance(make(), Halves):  # subtracted and added again
        assert_close(params, expected.target, rtol=1e-6)
    else:
        assert_same_bits(params, expected.target)
    is_wrapper = isinstance(expected.optimizer_def, OptaxWrapper)
    assert_same_bits(state, expected.state.param_states if is_wrapper else expected.state)


def test_hyper_parameters_are_keywords() -> None:
    tx = optax.chain(optax.clip(9.0), as_transformation(groups()))
    params, _ = run(tx, make_params(), learning_rate=0.25, weight_decay=0.5, unknown=1)
    expected = run_optimizer(groups(), learning_rate=0.25, weight_decay=0.5, missing="ignore")
    assert_same_bits(params, expected.target)
    params, _ = run(as_transformation(groups()), make_params(), group_overrides={"b": {}})
    assert_same_bits(params, run_optimizer(groups()).target)
    wrapped = as_transformation(opt.adamw(0.1))
    assert_same_bits(
        run(wrapped, make_params(), learning_rate=0.25)[0],
        run_optimizer(opt.adamw(0.1), learning_rate=0.25).target,
    )


def test_in_a_train_state_and_in_a_chain_of_ours() -> None:
    model = nn.Dense(2)
    x = jnp.ones((1, 3))
    params = model.init(jax.random.key(0), x)["params"]
    rules = [("kernel", opt.sgd(0.1, momentum=0.9)), ("bias", opt.sgd(0.5))]
    definition = MultiOptimizer.from_rules(rules)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=as_transformation(definition))
    grads = jax.tree.map(jnp.ones_like, params)
    step = jitted_once(lambda state, grads: state.apply_gradients(grads=grads))
    for _ in range(2):
        state = step(state, grads)
    optimizer = definition.create(params).apply_gradient(grads).apply_gradient(grads)
    assert jnp.allclose(state.params["kernel"], optimizer.target["kernel"])
    ours = opt.chain(opt.clip(1.0), definition).create(params)
    stepped = ours.apply_gradient(grads, learning_rate=0.25)
    assert stepped.target["bias"].tolist() == [-0.25, -0.25]


def test_parameters_are_needed_where_the_definition_needs_them() -> None:
    grads = jax.tree.map(jnp.ones_like, make_params())
    tx: Any = as_transformation(opt.sgd(0.5))
    assert tx.update(grads, tx.init(make_params()))[0]["b"].tolist() == [-0.5] * 3
    tx = as_transformation(groups())
    with pytest.raises(ValueError, match=r"call `tx.update\(grads, state, params\)`"):
        tx.update(grads, tx.init(make_params()))


def test_a_definition_or_optimizer_in_its_place_says_what_to_write() -> None:
    optimizer: Any = opt.sgd(0.1).create(make_params())
    with pytest.raises(TypeError, match=r"`as_transformation\(optimizer.optimizer_def\)`"):
        as_transformation(optimizer)
    for value, said in (
        (optax.sgd(0.1), "It already is a transformation."),
        (optax.sgd, "Call its constructor first."),
    ):
        with pytest.raises(TypeError, match=said):
            as_transformation(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "around",
    [
        lambda tx: optax.chain(optax.clip(9.0), tx),
        lambda tx: optax.MultiSteps(tx, 1),
    ],
)
def test_a_definition_stands_where_optax_takes_a_transformation(around: Any) -> None:
    ours, theirs = around(opt.adamw(0.1)), around(optax.adamw(0.1))
    assert_same_bits(run(ours, make_params()), run(theirs, make_params()))
    state = OptaxWrapper(ours).create(make_params())
    described = describe_state(state)
    expected = describe_state(OptaxWrapper(theirs).create(make_params()))
    assert described.leaves == expected.leaves
    assert [x.name for x in described.transformations] == [x.name for x in expected.transformations]


def test_keywords_reach_a_definition_but_not_through_containers_of_optax() -> None:
    grads = jax.tree.map(jnp.ones_like, make_params())
    definition: Any = opt.sgd(0.5)  # for type checkers no transformation of Optax
    state = definition.init(make_params())
    updates, _ = definition.update(grads, state, make_params(), learning_rate=0.25, unknown=1)
    assert updates["b"].tolist() == [-0.25] * 3
    optimizer = OptaxWrapper(optax.chain(optax.clip(9.0), definition)).create(make_params())
    with pytest.raises(HyperParamError, match="`learning_rate`: neither a hyper-parameter"):
        optimizer.apply_gradient(grads, learning_rate=0.25)


def test_a_definition_wrapped_again_keeps_its_hyper_parameters() -> None:
    definition = opt.sgd(0.5)
    again = OptaxWrapper(definition)
    assert again == definition
    assert again.hyper_params == definition.hyper_params
    with pytest.raises(
        TypeError, match=r"got MultiOptimizer\. It is a definition: use it, or `as_"
    ):
        OptaxWrapper(groups())
