"""Like transformations are told apart by what they captured, what updates them, whose they are."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_testing import EVERYTHING
from opt_checkpoint import errors, named_state, plan_restore
from opt_core import Optimizer, OptimizerDef, OptimizerState, describe_state
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")


@dataclasses.dataclass(frozen=True)
class Config:
    decay: float
    axes: tuple[str, ...] = ("x",)


def mine(config: Any) -> Any:
    """A transformation of a user's that has captured something."""

    def init_fn(tree: Any) -> Any:
        return {"mean": jax.tree.map(jnp.zeros_like, tree)}

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        assert config is not None, params
        return updates, {"mean": jax.tree.map(jnp.add, state["mean"], updates)}

    return optax.GradientTransformation(init_fn, update_fn)


def wrapped(*members: Any) -> Optimizer:
    optimizer = OptaxWrapper(optax.chain(*members)).create({"w": jnp.ones(3)})
    leaves, structure = jax.tree.flatten(optimizer.state)
    made = [
        (jnp.arange(x.size).reshape(x.shape) + i + 1).astype(x.dtype) for i, x in enumerate(leaves)
    ]
    return optimizer.replace(state=jax.tree.unflatten(structure, made))


_CAPTURED: dict[str, tuple[Any, Any]] = {
    "numbers": (optax.ema(0.9), optax.ema(0.5)),
    "injected schedules": tuple(
        optax.inject_hyperparams(optax.ema)(decay=decay)
        for decay in (optax.constant_schedule(0.9), optax.linear_schedule(0.9, 0.5, 10))
    ),
    "tuples": (mine((0.9, 0.1)), mine((0.5, 0.5))),
    "dataclasses": (mine(Config(0.9)), mine(Config(0.9, ("y",)))),
    "arrays": (mine(jnp.arange(3.0)), mine(jnp.ones(3))),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", _CAPTURED)
def test_what_changed_places_is_refused_and_goes_where_it_belongs(name: str) -> None:
    one, other = _CAPTURED[name]
    old, new = wrapped(one, other), wrapped(other, one)
    assert plan_restore(named_state(old), old).is_exact
    with pytest.raises(errors.PlanError, match="by its settings"):
        plan_restore(named_state(old), new).apply()
    found = plan_restore(named_state(old), new, allow={"optimizer"}).apply().state.param_states
    for state, was in zip(found, old.state.param_states[::-1], strict=True):
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(was), strict=True):
            np.testing.assert_array_equal(a, b)


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


# Called like others: the package that defines them is in their names

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


def by_init_of_optax() -> Any:
    """The same name, Optax's `init`, another update."""

    def scale_by_adam(make: Any) -> Any:
        def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
            return state.mu, state

        return optax.GradientTransformation(make, update_fn)

    return scale_by_adam(optax.scale_by_adam().init)


def stepped(tx: Any) -> Optimizer:
    optimizer = OptaxWrapper(tx).create(PARAMS)
    return optimizer.apply_gradient({"w": jnp.array([0.5, -1.0])})


OWN = {"a factory": scale_by_adam, "lambdas": with_lambdas, "Optax's init": by_init_of_optax}


@pytest.mark.parametrize("name", OWN)
def test_one_of_that_name_does_not_continue_as_optaxs_nor_the_other_way(name: str) -> None:
    mine, optaxs = OWN[name](), optax.scale_by_adam()
    for old, new in ((mine, optaxs), (optaxs, mine)):
        with pytest.raises(errors.PlanError):
            plan_restore(named_state(stepped(old)), stepped(new)).apply()
        if name != "Optax's init":  # whatever is allowed, no moment of the other is taken
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


SCRIPT = """
import sys
import jax.numpy as jnp
import optax
from opt_core.extend import origin_of

def mine():
    return optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))

class Mine:
    def init(self):
        pass

print(origin_of(mine), origin_of(mine().init), origin_of(Mine), origin_of(Mine().init))
"""


@pytest.mark.slow
def test_a_script_is_called_as_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "lab").mkdir()
    for path in ("train.py", "lab/train.py"):
        (tmp_path / path).write_text(SCRIPT)
    for arguments, expected in (["train.py"], "train"), (["-m", "lab.train"], "lab"):
        run = [sys.executable, *arguments]
        found = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True)
        assert found.stdout.split() == [expected] * 4
