"""Optax's optimizers that take the loss, inside groups; and what the table says of defaults."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from opt_core import FROZEN, MultiOptimizer, OptimizerDef, describe
from opt_core.errors import HyperParamError


def make_params() -> Any:
    return {"k": jnp.array([1.0, 2.0, 3.0]), "b": jnp.ones(2)}


def loss(params: Any) -> jax.Array:
    k = params["k"]
    value: jax.Array = jnp.sum((k - 1) ** 4) + jnp.sum(k) * params["b"][0] ** 2
    return value


def step(optimizer: Any, value_fn: Any) -> Any:
    value, grad = jax.value_and_grad(value_fn)(optimizer.target)
    return optimizer.apply_gradient(grad, value=value, grad=grad, value_fn=value_fn)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_line_search_sees_the_loss_of_its_own_leaves(is_nested: bool) -> None:
    """The others stay where they are: as L-BFGS alone, on the loss with these fixed."""
    lbfgs: OptimizerDef = opt.lbfgs()
    if is_nested:
        lbfgs = MultiOptimizer.from_rules([("k", lbfgs)])
    rules = [("b", "b", opt.sgd(0.0)), ("k", "k", lbfgs)]
    optimizer = MultiOptimizer.from_rules(rules).create(make_params())
    alone = opt.lbfgs().create({"k": make_params()["k"]})
    compiled = jax.jit(lambda o: step(o, loss))
    for _ in range(3):
        optimizer = compiled(optimizer)
        alone = step(alone, lambda params: loss({**params, "b": jnp.ones(2)}))
    np.testing.assert_allclose(optimizer.target["k"], alone.target["k"], rtol=1e-6)
    assert not np.allclose(optimizer.target["k"], make_params()["k"])


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "group `k`: `value`: the update of .* needs it; call"),
        ({"valu": 3.0}, "group `k`: `valu`: neither a hyper-parameter"),
    ],
)
def test_an_argument_that_an_update_needs(extra: Any, words: str) -> None:
    definition = MultiOptimizer.from_rules([("k", "k", opt.polyak_sgd())], rest=FROZEN)
    optimizer = definition.create(make_params())
    with pytest.raises(HyperParamError, match=words):
        optimizer.apply_gradient(make_params(), **extra)
    assert int(optimizer.apply_gradient(make_params(), value=3.0).state.step) == 1


def test_the_table_leaves_defaults_out() -> None:
    rules = [("k", "k", opt.adam(0.1, b1=0.5)), ("b", "b", opt.adamw(0.1, weight_decay=1e-4))]
    rows = describe(MultiOptimizer.from_rules(rules).create(make_params())).rows
    assert [row.hyper_params for row in rows] == ["learning_rate=0.1, b1=0.5", "learning_rate=0.1"]
