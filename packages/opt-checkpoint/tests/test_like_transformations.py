"""Transformations of one kind are told apart by what they captured, or what updates them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_checkpoint import errors, named_state, plan_restore
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")
Make = Callable[[Any], Any]


class Kept(NamedTuple):
    mean: Any


@dataclasses.dataclass(frozen=True)
class Config:
    decay: float
    axes: tuple[str, ...] = ("x",)


def mine(config: Any) -> Any:
    """A transformation of a user's that has captured something."""

    def init_fn(tree: Any) -> Any:
        return Kept(jax.tree.map(jnp.zeros_like, tree))

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        assert config is not None, params
        return updates, Kept(jax.tree.map(jnp.add, state.mean, updates))

    return optax.GradientTransformation(init_fn, update_fn)


def injected(decay: Any) -> Any:
    return optax.inject_hyperparams(optax.ema)(decay=decay)


def wrapped(*members: Any) -> Optimizer:
    optimizer = OptaxWrapper(optax.chain(*members)).create({"w": jnp.ones(3)})
    leaves, structure = jax.tree.flatten(optimizer.state)
    made = [
        (jnp.arange(x.size).reshape(x.shape) + i + 1).astype(x.dtype) for i, x in enumerate(leaves)
    ]
    return optimizer.replace(state=jax.tree.unflatten(structure, made))


_CAPTURED: dict[str, tuple[Make, Any, Any]] = {
    "numbers": (optax.ema, 0.9, 0.5),
    "injected numbers": (injected, 0.9, 0.5),
    "injected schedules": (
        injected,
        optax.constant_schedule(0.9),
        optax.linear_schedule(0.9, 0.5, 10),
    ),
    "tuples": (mine, (0.9, 0.1), (0.5, 0.5)),
    "dataclasses": (mine, Config(0.9), Config(0.9, ("y",))),
    "jax arrays": (mine, jnp.arange(3.0), jnp.ones(3)),
    "lambdas": (mine, lambda x: x + 1, lambda x: x * x),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", _CAPTURED)
def test_what_changed_places_is_refused_and_goes_where_it_belongs(name: str) -> None:
    make, one, other = _CAPTURED[name]
    old, new = wrapped(make(one), make(other)), wrapped(make(other), make(one))
    assert plan_restore(named_state(old), old).is_exact
    plan = plan_restore(named_state(old), new)
    with pytest.raises(errors.PlanError, match="by their settings, "):
        plan.apply()
    found = plan_restore(named_state(old), new, allow={"optimizer"}).apply().state.param_states
    expected = old.state.param_states
    for i in range(2):
        for a, b in zip(jax.tree.leaves(found[i]), jax.tree.leaves(expected[1 - i]), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["numbers", "injected numbers", "lambdas"])
def test_a_single_one_may_be_set_otherwise(name: str) -> None:
    make, one, other = _CAPTURED[name]
    plan = plan_restore(named_state(wrapped(make(one))), wrapped(make(other)))
    assert plan.is_ok
    assert plan.is_exact == (make is not injected)


def test_what_is_injected_may_change_also_in_two() -> None:
    old, new = wrapped(injected(0.9), injected(0.5)), wrapped(injected(0.8), injected(0.5))
    plan = plan_restore(named_state(old), new)
    assert plan.is_ok
    assert not plan.is_exact
    assert plan.diff().count("`decay` was 0.9, is 0.8 in the code, which acts") == 1


# Of one `init`


def init_fn(tree: Any) -> Any:
    return {"m": jax.tree.map(jnp.zeros_like, tree)}


def update_one(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, state


def update_other(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, {"m": updates}


def update_third(updates: Any, state: Any, params: Any = None) -> Any:
    del params
    return updates, {"m": jax.tree.map(jnp.square, state["m"])}


def test_what_shares_an_init_keeps_its_own_state() -> None:
    one, other, third = (
        optax.GradientTransformation(init_fn, update)
        for update in (update_one, update_other, update_third)
    )
    old = wrapped(one, other)
    assert plan_restore(named_state(old), old).is_exact
    exchanged = plan_restore(named_state(old), wrapped(other, one), allow={"optimizer"})
    left = plan_restore(named_state(old), wrapped(other), allow={"optimizer", "drop"})
    was = [state["m"]["w"] for state in old.state.param_states]
    now = [state["m"]["w"] for state in exchanged.apply().state.param_states]
    np.testing.assert_array_equal(now, was[::-1])
    np.testing.assert_array_equal(left.apply().state.param_states[0]["m"]["w"], was[1])
    with pytest.raises(errors.PlanError, match="no other has its settings"):
        plan_restore(named_state(old), wrapped(third, one), allow={"optimizer"}).apply()
