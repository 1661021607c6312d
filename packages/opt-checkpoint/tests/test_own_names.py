"""Transformations that are called like others: the package that defines them is in their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from opt_checkpoint import Rename, errors, named_state, plan_restore
from opt_core import Optimizer, OptimizerDef, OptimizerState, describe_state, regroup
from opt_core.errors import SurgeryError
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define
PARAMS = {"w": jnp.array([1.0, 2.0])}
_ANYTHING = {"initialise", "drop", "cast", "reshape", "regroup", "optimizer"}


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


def wrapped(tx: Any) -> Optimizer:
    optimizer = OptaxWrapper(tx).create(PARAMS)
    return optimizer.apply_gradient({"w": jnp.array([0.5, -1.0])})


OWN = {"a factory": scale_by_adam, "lambdas": with_lambdas, "Optax's init": by_init_of_optax}


@pytest.mark.parametrize("name", OWN)
def test_one_of_that_name_does_not_continue_as_optaxs_nor_the_other_way(name: str) -> None:
    mine, optaxs = OWN[name](), optax.scale_by_adam()
    for old, new in ((mine, optaxs), (optaxs, mine)):
        with pytest.raises(errors.PlanError):
            plan_restore(named_state(wrapped(old)), wrapped(new)).apply()
        with pytest.raises(SurgeryError):
            regroup(wrapped(old), OptaxWrapper(new))
        if name != "Optax's init":  # whatever is allowed, no moment of the other is taken
            saved, target = wrapped(old), OptaxWrapper(new).create(PARAMS)
            plan = plan_restore(named_state(saved), target, allow=_ANYTHING)
            assert not plan.suggestions
            moved, _ = regroup(saved, OptaxWrapper(new), allow=_ANYTHING)
            for optimizer in (plan.apply(), moved):
                assert not optimizer.state.param_states.mu["w"].any()


def test_a_rule_takes_it() -> None:
    saved = wrapped(optax.scale_by_adam())
    rules: Any = [(rf"state/{MINE}\.adam/(.*)", Rename(r"state/adam/\1"))]
    target = wrapped(scale_by_adam())
    found = plan_restore(named_state(saved), target, rules=rules, allow={"optimizer"}).apply()
    assert (found.state.param_states.mu["w"] == saved.state.param_states.mu["w"]).all()


def test_names() -> None:
    def names(tx: Any) -> list[str]:
        return [made.name for made in describe_state(wrapped(tx)).transformations]

    assert names(optax.adam(0.1)) == ["adam", "scale"]
    both = optax.chain(scale_by_adam(), optax.scale_by_adam(), optax.scale(-1.0))
    assert names(both) == [f"{MINE}.adam", "adam", "scale"]
    assert f"state/{MINE}.adam/mu/w" in named_state(wrapped(both))
    assert names(by_init_of_optax()) == ["adam"]
    (made,) = describe_state(wrapped(by_init_of_optax())).transformations
    assert made.settings["update"] == f"{MINE}.adam"


class Trace(OptimizerDef):
    """A definition called like Optax's, with the class of its state."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.int32(0), optax.TraceState(jax.tree.map(jnp.ones_like, params)))


def test_a_definition_of_that_name_is_another() -> None:
    own, optaxs = Trace({}).create(PARAMS), wrapped(optax.trace(0.9))
    assert {x.transformation for x in describe_state(own).leaves} == {f"{MINE}.trace"}
    for old, new in ((own, optaxs), (optaxs, own)):
        with pytest.raises(errors.PlanError):
            plan_restore(named_state(old), new).apply()
        with pytest.raises(SurgeryError):
            regroup(old, new.optimizer_def)


SCRIPT = """
import sys
import jax.numpy as jnp
import optax
from opt_core.closures import origin_of

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
