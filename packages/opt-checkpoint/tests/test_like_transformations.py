"""What is called like a transformation of Optax is not taken for it."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpoint_testing import EVERYTHING
from opt_checkpoint import errors, named_state, plan_restore
from opt_core import Optimizer, OptimizerDef, OptimizerState, describe_state
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")


MINE = __name__.partition(".")[0]  # the package of what these tests define
PARAMS = {"w": jnp.array([1.0, 2.0])}


def scale_by_adam(b1: float = 0.9, b2: float = 0.999) -> Any:
    """Sums, not averages, in the classes of Optax."""

    def init_fn(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.int32(0), zeros, zeros)

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        mu = jax.tree.map(lambda m, g: b1 * m + g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + g * g, state.nu, updates)
        return mu, optax.ScaleByAdamState(state.count + 1, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def with_lambdas() -> Any:
    """No name of a function tells it from Optax's, but the class of the state is Optax's."""
    own = scale_by_adam()
    return optax.GradientTransformation(lambda p: own.init(p), lambda u, s, p=None: (u, s))


def stepped(tx: Any) -> Optimizer:
    optimizer = OptaxWrapper(tx).create(PARAMS)
    return optimizer.apply_gradient({"w": jnp.array([0.5, -1.0])})


OWN = {"a factory": scale_by_adam, "lambdas": with_lambdas}


@pytest.mark.parametrize("name", OWN)
def test_one_of_that_name_does_not_continue_as_optaxs_nor_the_other_way(name: str) -> None:
    mine, optaxs = OWN[name](), optax.scale_by_adam()
    for old, new in ((mine, optaxs), (optaxs, mine)):
        with pytest.raises(errors.PlanError):
            plan_restore(named_state(stepped(old)), stepped(new)).apply()
        # Whatever is allowed, no moment of the other is taken.
        saved, target = stepped(old), OptaxWrapper(new).create(PARAMS)
        plan = plan_restore(named_state(saved), target, allow=EVERYTHING)
        assert not any("may be the former" in note for note in plan.notes)
        assert not plan.apply().state.param_states.mu["w"].any()


class Trace(OptimizerDef):
    """A definition called like Optax's, with the class of its state."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.int32(0), optax.TraceState(jax.tree.map(jnp.ones_like, params)))


def test_a_definition_of_that_name_is_another() -> None:
    own, optaxs = Trace({}).create(PARAMS), stepped(optax.trace(0.9))
    assert {x.transformation for x in describe_state(own).leaves} == {f"{MINE}.trace"}
    for old, new in ((own, optaxs), (optaxs, own)):
        with pytest.raises(errors.PlanError):
            plan_restore(named_state(old), new).apply()
