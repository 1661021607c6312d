"""Transformations that share an `init` are told apart by what updates them."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_checkpoint import Rename, errors, named_state, plan_restore
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define


class Momentum:
    def init(self, tree: Any) -> Any:
        return {"m": jax.tree.map(jnp.zeros_like, tree)}

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return updates, state


class Squares(Momentum):
    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return updates, {"m": jax.tree.map(jnp.square, state["m"])}


class Cubes(Squares):
    pass


def init_fn(tree: Any) -> Any:
    return {"m": jax.tree.map(jnp.zeros_like, tree)}


def update_one(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, state


def update_other(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, {"m": updates}


def of(made: Any) -> Any:
    return optax.GradientTransformation(made.init, made.update)


PAIRS = {
    "a class and a subclass": (of(Momentum()), of(Squares())),
    "one function": (
        optax.GradientTransformation(init_fn, update_one),
        optax.GradientTransformation(init_fn, update_other),
    ),
}


def wrapped(*members: Any) -> Optimizer:
    optimizer = OptaxWrapper(optax.chain(*members)).create({"w": jnp.ones(2)})
    leaves, structure = jax.tree.flatten(optimizer.state)
    made = [jnp.full_like(x, i + 1) for i, x in enumerate(leaves)]
    return optimizer.replace(state=jax.tree.unflatten(structure, made))


@pytest.mark.parametrize("name", PAIRS)
def test_they_keep_their_states_where_others_change(name: str) -> None:
    one, other = PAIRS[name]
    old = wrapped(optax.clip(9.0), one, other)
    assert plan_restore(named_state(old), old).is_exact
    plan = plan_restore(named_state(old), wrapped(other, one), allow={"optimizer"})
    found = plan.apply().state.param_states
    np.testing.assert_array_equal(found[0]["m"]["w"], old.state.param_states[2]["m"]["w"])
    np.testing.assert_array_equal(found[1]["m"]["w"], old.state.param_states[1]["m"]["w"])


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_left_of_two_keeps_its_own(name: str) -> None:
    one, other = PAIRS[name]
    old = wrapped(one, other)
    plan = plan_restore(named_state(old), wrapped(other), allow={"optimizer", "drop"})
    found = plan.apply().state.param_states
    np.testing.assert_array_equal(found[0]["m"]["w"], old.state.param_states[1]["m"]["w"])


def test_no_other_update_goes_on_with_a_state_of_two() -> None:
    old = wrapped(of(Momentum()), of(Squares()))
    plan = plan_restore(named_state(old), wrapped(of(Cubes()), of(Momentum())), allow={"optimizer"})
    with pytest.raises(errors.PlanError, match="no other has its settings"):
        plan.apply()


def test_a_single_one_does_not_go_on_with_another_update() -> None:
    """Only a rule that names the leaves takes them over."""
    one, other = PAIRS["one function"]
    plan = plan_restore(named_state(wrapped(one)), wrapped(other), allow={"optimizer"})
    (problem,) = plan.problems
    assert problem.startswith(
        f"`update` of `{MINE}.init_fn` was {MINE}.update_one, is {MINE}.update_other: "
    )
    rules: Any = [(f"state/{MINE}.init_fn/m/w", Rename(f"state/{MINE}.init_fn/m/w"))]
    assert plan_restore(named_state(wrapped(one)), wrapped(other), rules=rules).is_ok
