"""Optax's optimizers that take the loss, or gradients of examples, in groups; the table."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
import pytest
from opt_core import FROZEN, MultiOptimizer
from opt_core.errors import GroupError, HyperParamError, TreeMismatchError


def make_params() -> Any:
    return {"k": jnp.array([1.0, 2.0, 3.0]), "b": jnp.ones(2)}


def loss(params: Any) -> jax.Array:
    value: jax.Array = jnp.sum((params["k"] - 1) ** 4) + jnp.sum(params["b"] ** 2)
    return value


def step(optimizer: Any) -> Any:
    value, grad = jax.value_and_grad(loss)(optimizer.target)
    return optimizer.apply_gradient(grad, value=value, grad=grad, value_fn=loss)


def test_a_line_search_is_for_all_parameters() -> None:
    """Alone, or in a group that has them all; not in one of several."""
    search = opt.chain(opt.scale(-1.0), opt.scale_by_backtracking_linesearch(10))
    alone = search.create(make_params())
    whole = MultiOptimizer.from_rules([("all", ".*", search)]).create(make_params())
    alone, whole = step(alone), step(whole)
    assert loss(whole.target) == loss(alone.target) < loss(make_params())
    inner = MultiOptimizer.from_rules([("k", search)], rest=FROZEN)
    for definition in (inner, MultiOptimizer.from_rules([("all", ".*", inner)])):
        with pytest.raises(GroupError, match=r"is about all parameters.*optax\.partition"):
            step(definition.create(make_params()))


def test_directions_in_groups_and_one_search() -> None:
    """What the error says to write."""
    labels = {"k": "k", "b": "b"}
    tx = optax.chain(
        optax.partition({"k": optax.scale_by_lbfgs(), "b": optax.scale(0.4)}, labels),
        optax.scale(-1.0),
        optax.scale_by_backtracking_linesearch(10),
    )
    optimizer = opt.OptaxWrapper(tx).create(make_params())
    step_compiled = jax.jit(step)
    for _ in range(5):
        optimizer = step_compiled(optimizer)
    assert loss(optimizer.target) < 0.1 * loss(make_params())


def test_gradients_of_examples_are_for_all_parameters() -> None:
    private = opt.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.0, seed=0)
    examples = jax.tree.map(lambda p: jnp.stack([p, p]), make_params())
    assert private.create(make_params()).apply_gradient(examples).step == 1
    groups = MultiOptimizer.from_rules([("k", private)], rest=opt.sgd(0.1))
    with pytest.raises(TreeMismatchError) as caught:
        groups.create(make_params()).apply_gradient(examples)
    assert "b: expected shape (2,), found (2, 2)" in str(caught.value)
    assert "Groups do not take the gradients of every example" in str(caught.value)
    assert "`optax.partition`" in str(caught.value)


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
