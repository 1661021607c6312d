"""Settings that change between two runs: a restore and surgery in memory give one answer."""

from __future__ import annotations

import dataclasses
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
    Map,
    NamedState,
    Plan,
    Rename,
    errors,
    named_state,
    plan_restore,
)
from opt_core import MultiOptimizer, Optimizer, regroup
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


def steps(k: int) -> Any:
    return optax.MultiSteps(optax.sgd(0.1, momentum=0.9), k).gradient_transformation()


def leaves(optimizer: Optimizer) -> dict[str, Any]:
    return {name: np.asarray(leaf) for name, leaf in named_state(optimizer).items()}


def by_restore(old: Optimizer, new: Any, allow: Any = ()) -> Optimizer:
    restored: Optimizer = plan_restore(named_state(old), wrapped(new), allow=allow).apply()
    return restored


def by_surgery(old: Optimizer, new: Any, allow: Any = ()) -> Optimizer:
    return regroup(old, OptaxWrapper(new), allow=allow)[0]


DOORS: list[Callable[..., Optimizer]] = [by_restore, by_surgery]
doors = pytest.mark.parametrize("door", DOORS, ids=["restore", "surgery"])

WINDOWS: dict[str, tuple[Any, Any, int]] = {
    "multi_steps shorter": (steps(4), steps(2), 4),
    "multi_steps longer": (steps(2), steps(3), 2),
    "apply_every shorter": (optax.apply_every(4), optax.apply_every(2), 4),
    "apply_every longer": (optax.apply_every(2), optax.apply_every(3), 2),
    "sam": (
        contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=4),
        contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=2),
        4,
    ),
}


@pytest.mark.sample(1)
@doors
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_takes_its_new_length_when_the_last_one_is_complete(name: str, door: Any) -> None:
    before, after, length = WINDOWS[name]
    old = stepped(wrapped(before), 2 * length)
    # The new definition on the old state: outside of a window nothing of it depends on the length.
    expected = stepped(old.replace(optimizer_def=OptaxWrapper(after)), 6)
    found = stepped(door(old, after), 6)
    assert not np.array_equal(found.target["a"], old.target["a"])
    for leaf, value in leaves(expected).items():
        np.testing.assert_array_equal(leaves(found)[leaf], value, err_msg=leaf)


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


def counted(optimizer: Optimizer, **values: int) -> NamedState:
    """The names of an optimizer, where integers whose field is given have that value."""
    named = named_state(optimizer)
    leaves = tuple(
        dataclasses.replace(leaf, value=values.get(leaf.path[-1], leaf.value))
        for leaf in named.schema.leaves
    )
    return NamedState(named.leaves, dataclasses.replace(named.schema, leaves=leaves))


def planned(old: Any, new: Any, **values: int) -> Plan[Any]:
    return plan_restore(counted(matrix(old), **values), matrix(new), allow=EVERYTHING)


def shared(update: Any) -> Any:
    return optax.GradientTransformation(optax.trace(0.9).init, update)


def one(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, state


def other(updates: Any, state: Any, params: Any = None) -> Any:
    return state.trace, state


def scaled(by: Any, *, rate: float = 0.1, moments: Any = optax.scale_by_adam) -> Any:
    first = optax.scale_by_schedule(by) if callable(by) else optax.scale(by)
    return optax.chain(first, optax.clip(1.0), moments(), optax.scale(-rate))


def test_another_update_needs_a_rule() -> None:
    old, new = shared(one), shared(other)
    assert plan_restore(named_state(matrix(old)), matrix(old)).is_exact
    plan = planned(old, new)
    with pytest.raises(errors.PlanError):
        plan.check()
    assert len(plan.problems) == 1
    told = f"`update` of `trace` was {MINE}.one, is {MINE}.other"
    assert plan.problems[0].startswith(told)
    assert plan.problems[0].endswith("for all leaves of the transformation, `state/trace/.*`")
    rules: Any = [("(state/trace/.*)", Rename(r"\1"))]
    assert plan_restore(named_state(matrix(old)), matrix(new), rules=rules).is_ok


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


def test_moments_in_other_units_by_a_rule() -> None:
    saved, target = named_state(matrix(scaled(4.0))), matrix(scaled(2.0))
    rules: Any = [
        (r"(state/adam/mu/.*)", Map(r"\1", lambda x: x / 2)),
        (r"(state/adam/nu/.*)", Map(r"\1", lambda x: x / 4)),
    ]
    assert not plan_restore(saved, target, rules=rules[:1]).is_ok
    assert plan_restore(saved, target, rules=rules).is_ok


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
