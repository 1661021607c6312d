"""Settings that change between two runs: a restore and surgery in memory give one answer."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_testing import EVERYTHING
from opt_checkpoint import (
    Checkpointer,
    Plan,
    Rename,
    errors,
    named_state,
    plan_restore,
)
from opt_core import (
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    describe_state,
    regroup,
)
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
contrib: Any = importlib.import_module("optax.contrib")
pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define

PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([0.5])}
GRADS = {"a": jnp.array([0.25, -0.5]), "b": jnp.array([1.0])}


def wrapped(tx: Any) -> Optimizer:
    return OptaxWrapper(tx).create(PARAMS)


def stepped(optimizer: Optimizer, steps: int) -> Optimizer:
    for _ in range(steps):
        optimizer = optimizer.apply_gradient(GRADS)
    return optimizer


def leaves(optimizer: Optimizer) -> dict[str, Any]:
    return {name: np.asarray(leaf) for name, leaf in named_state(optimizer).items()}


def by_restore(old: Optimizer, new: Any, allow: Any = ()) -> Optimizer:
    restored: Optimizer = plan_restore(named_state(old), wrapped(new), allow=allow).apply()
    return restored


def by_surgery(old: Optimizer, new: Any, allow: Any = ()) -> Optimizer:
    return regroup(old, OptaxWrapper(new), allow=allow)[0]


DOORS: list[Callable[..., Optimizer]] = [by_restore, by_surgery]
doors = pytest.mark.parametrize("door", DOORS, ids=["restore", "surgery"])


def injected(rate: Any, **options: Any) -> Any:
    return optax.inject_hyperparams(optax.adamw)(learning_rate=rate, **options)


RATE = "state/inject_hyperparams/hyperparams/learning_rate"


def with_rate(optimizer: Optimizer, rate: float) -> Optimizer:
    """As a program does that sets the rate while it trains."""
    inject = optimizer.state.param_states
    changed = {**inject.hyperparams, "learning_rate": jnp.float32(rate)}
    state = inject._replace(hyperparams=changed)
    return optimizer.replace(state=optimizer.state.replace(param_states=state))


@doors
def test_a_rate_set_at_run_time_continues_under_the_same_code(door: Any) -> None:
    old = with_rate(stepped(wrapped(injected(0.5)), 3), 0.125)
    assert leaves(door(old, injected(0.5)))[RATE] == 0.125
    assert plan_restore(named_state(old), wrapped(injected(0.5))).is_exact


@doors
def test_a_rate_changed_in_the_code_acts(door: Any) -> None:
    old = with_rate(stepped(wrapped(injected(0.5)), 3), 0.125)
    found = door(old, injected(0.25))
    expected = leaves(with_rate(old, 0.25))
    for name, leaf in leaves(found).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def test_a_rate_changed_in_the_code_is_reported(tmp_path: Any) -> None:
    old = stepped(wrapped(injected(0.5)), 3)
    told = "`learning_rate` was 0.5, is 0.25 in the code, which acts"
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, old)
        checkpointer.wait()
        plan = plan_restore(checkpointer.at(3), wrapped(injected(0.25)))
        assert checkpointer.restore_latest(wrapped(injected(0.25))).state.step == 3
    assert plan.is_ok
    assert not plan.is_exact
    assert f"+ {RATE} float32[]: {told}" in str(plan)


# Plans of a matrix


def matrix(tx: Any, **options: Any) -> Optimizer:
    return OptaxWrapper(tx, **options).create({"w": jnp.arange(8.0).reshape(2, 4)})


def one(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, state


def test_the_pattern_of_a_rule_for_the_second_transformation_of_a_group() -> None:
    def definition(*, corrected: bool) -> MultiOptimizer:
        rms = optax.scale_by_rms(bias_correction=corrected)
        plain = optax.scale_by_rms(bias_correction=True)
        return MultiOptimizer.from_rules([("a.b", ".*", OptaxWrapper(optax.chain(plain, rms)))])

    params = {"w": jnp.ones(3)}
    saved, target = (
        named_state(definition(corrected=True).create(params)),
        definition(corrected=False).create(params),
    )
    plan = plan_restore(saved, target, allow=EVERYTHING)
    (pattern,) = re.findall(r"transformation, `(.*)`$", plan.problems[0])
    assert pattern == r"state/groups/a\.b/rms\#2/.*"
    rules: Any = [(pattern, "initialise")]
    assert plan_restore(saved, target, allow=EVERYTHING, rules=rules).is_ok


def momentum() -> Any:
    def init_fn(tree: Any) -> Any:
        return {"m": jax.tree.map(jnp.zeros_like, tree)}

    return optax.GradientTransformation(init_fn, one)


def velocity() -> Any:
    def init_fn(tree: Any) -> Any:
        return {"m": jax.tree.map(jnp.zeros_like, tree)}

    return optax.GradientTransformation(init_fn, one)


def test_a_rename_is_suggested_where_there_is_one_choice() -> None:
    saved = named_state(matrix(momentum()))
    target = matrix(velocity())
    plan = plan_restore(saved, target)
    (told,) = suggestions(plan)
    assert (
        f"rules=[(r'state/{MINE}\\.velocity/(.*)', Rename(r'state/{MINE}.momentum/\\1'))]" in told
    )
    rules = [(rf"state/{MINE}.velocity/(.*)", Rename(rf"state/{MINE}.momentum/\1"))]
    renamed = plan_restore(saved, target, rules=rules)
    assert renamed.is_ok
    assert not suggestions(renamed)
    # None where there are two, or the names are known.
    two = matrix(optax.chain(velocity(), velocity()))
    assert not suggestions(plan_restore(saved, two))
    adam, adamax = matrix(optax.adam(0.1)), matrix(optax.adamax(0.1))
    assert not suggestions(plan_restore(named_state(adam), adamax))


def suggestions(plan: Plan[Any]) -> list[str]:
    return [note for note in plan.notes if "may be the former" in note]


# What is called like a transformation of Optax is not taken for it.


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


OWN = {"a factory": scale_by_adam, "lambdas": with_lambdas}


@pytest.mark.parametrize("name", OWN)
def test_one_of_that_name_does_not_continue_as_optaxs_nor_the_other_way(name: str) -> None:
    mine, optaxs = OWN[name](), optax.scale_by_adam()
    for old, new in ((mine, optaxs), (optaxs, mine)):
        with pytest.raises(errors.PlanError):
            plan_restore(named_state(stepped(wrapped(old), 1)), stepped(wrapped(new), 1)).apply()
        # Whatever is allowed, no moment of the other is taken.
        saved, target = stepped(wrapped(old), 1), wrapped(new)
        plan = plan_restore(named_state(saved), target, allow=EVERYTHING)
        assert not any("may be the former" in note for note in plan.notes)
        assert not plan.apply().state.param_states.mu["a"].any()


class Trace(OptimizerDef):
    """A definition called like Optax's, with the class of its state."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.int32(0), optax.TraceState(jax.tree.map(jnp.ones_like, params)))


def test_a_definition_of_that_name_is_another() -> None:
    own, optaxs = Trace({}).create(PARAMS), stepped(wrapped(optax.trace(0.9)), 1)
    assert {x.transformation for x in describe_state(own).leaves} == {f"{MINE}.trace"}
    for old, new in ((own, optaxs), (optaxs, own)):
        with pytest.raises(errors.PlanError):
            plan_restore(named_state(old), new).apply()
