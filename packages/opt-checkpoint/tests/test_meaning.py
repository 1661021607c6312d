"""What a changed setting does to a plan, and transformations that were renamed."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from opt_checkpoint import Map, NamedState, Plan, Rename, errors, named_state, plan_restore
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
contrib: Any = importlib.import_module("optax.contrib")
pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define

EVERYTHING = {"initialise", "drop", "cast", "reshape", "optimizer", "regroup"}


def wrapped(tx: Any, **options: Any) -> Optimizer:
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
    return plan_restore(counted(wrapped(old), **values), wrapped(new), allow=EVERYTHING)


def plateau(**settings: int) -> Any:
    return contrib.reduce_on_plateau(**{"accumulation_size": 4, "patience": 9, **settings})


def chained(tx: Any) -> Any:
    return optax.chain(optax.sgd(0.1), tx)


def shared(update: Any) -> Any:
    return optax.GradientTransformation(optax.trace(0.9).init, update)


def one(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, state


def other(updates: Any, state: Any, params: Any = None) -> Any:
    return state.trace, state


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "schedule_free b1": (
        contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9),
        contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.5),
        "`b1` of `schedule_free` was 0.9, is 0.5",
    ),
    "muon ns_coeffs": (
        contrib.muon(0.1),
        contrib.muon(0.1, ns_coeffs=(3.0, -4.0, 2.0)),
        "`ns_coeffs` of `muon`",
    ),
    "prodigy": (
        contrib.prodigy(estim_lr0=1e-6),
        contrib.prodigy(estim_lr0=1e-3),
        "`estim_lr0` of `prodigy` was 1e-06, is 0.001",
    ),
    "another update": (
        shared(one),
        shared(other),
        f"`update` of `trace` was {MINE}.one, is {MINE}.other",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_the_meaning_of_the_state_needs_a_rule(name: str) -> None:
    old, new, told = REFUSED[name]
    assert plan_restore(named_state(wrapped(old)), wrapped(old)).is_exact
    plan = planned(old, new)
    with pytest.raises(errors.PlanError):
        plan.check()
    assert len(plan.problems) == 1
    assert plan.problems[0].startswith(told)
    rules: Any = [("(state/.*)", Rename(r"\1"))]
    saved = named_state(wrapped(old))
    assert plan_restore(saved, wrapped(new), allow=EVERYTHING, rules=rules).is_ok


@pytest.mark.parametrize(
    ("settings", "counts", "is_refused"),
    [
        ({"patience": 5}, {"plateau_count": 4}, False),
        ({"patience": 5}, {"plateau_count": 5}, True),
        ({"patience": 12}, {"plateau_count": 6}, False),
        ({"accumulation_size": 2}, {"count": 2}, True),
        ({"accumulation_size": 3, "patience": 5}, {"count": 3, "plateau_count": 2}, True),
        ({"factor": 0.5}, {"count": 3, "plateau_count": 8}, False),
    ],
)
def test_a_length_is_refused_at_or_below_the_count(
    settings: dict[str, Any], counts: dict[str, int], is_refused: bool
) -> None:
    plan = planned(chained(plateau()), chained(plateau(**settings)), **counts)
    assert plan.is_exact == (not is_refused)
    assert len(plan.problems) == is_refused
    assert all("which is" in problem for problem in plan.problems)


def scaled(by: Any, *, rate: float = 0.1, moments: Any = optax.scale_by_adam) -> Any:
    first = optax.scale_by_schedule(by) if callable(by) else optax.scale(by)
    return optax.chain(first, optax.clip(1.0), moments(), optax.scale(-rate))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (scaled(1024.0), scaled(1.0), "`step_size` of `scale` was 1024.0, is 1.0"),
        (scaled(2.0, rate=0.1), scaled(0.1, rate=-2.0), "`step_size` of `scale` was 2.0, is 0.1"),
        (
            scaled(optax.constant_schedule(2.0)),
            scaled(optax.constant_schedule(1.0)),
            "`step_size_fn` of `schedule` was",
        ),
        (optax.MultiSteps(scaled(2.0), 2), optax.MultiSteps(scaled(1.0), 2), "`step_size` of"),
    ],
)
def test_what_multiplies_before_moments_may_not_change(old: Any, new: Any, told: str) -> None:
    plan = planned(old, new)
    assert not plan.is_ok
    (problem,) = plan.problems
    assert problem.startswith(told)


def test_what_multiplies_after_moments_may_change() -> None:
    assert planned(scaled(2.0, rate=0.1), scaled(2.0, rate=0.2)).is_exact
    assert planned(scaled(2.0, moments=optax.identity), scaled(1.0, moments=optax.identity)).is_ok


def test_moments_in_other_units_by_a_rule() -> None:
    saved, target = named_state(wrapped(scaled(4.0))), wrapped(scaled(2.0))
    rules: Any = [
        (r"(state/adam/mu/.*)", Map(r"\1", lambda x: x / 2)),
        (r"(state/adam/nu/.*)", Map(r"\1", lambda x: x / 4)),
    ]
    assert not plan_restore(saved, target, rules=rules[:1]).is_ok
    assert plan_restore(saved, target, rules=rules).is_ok


@pytest.mark.parametrize(("offset", "is_refused"), [(5, False), (6, True), (10, True)])
def test_an_offset_is_refused_above_the_count(offset: int, is_refused: bool) -> None:
    plan = planned(optax.adafactor(0.1), optax.adafactor(0.1, decay_offset=offset), count=5)
    assert plan.is_exact == (not is_refused)
    assert len(plan.problems) == is_refused
    assert all("it must not be above `count`, which is 5" in problem for problem in plan.problems)


def my_momentum(tree: Any) -> Any:
    return {"m": jax.tree.map(jnp.zeros_like, tree)}


def momentum() -> Any:
    def init_fn(tree: Any) -> Any:
        return my_momentum(tree)

    return optax.GradientTransformation(init_fn, one)


def velocity() -> Any:
    def init_fn(tree: Any) -> Any:
        return my_momentum(tree)

    return optax.GradientTransformation(init_fn, one)


def speed() -> Any:
    def init_fn(tree: Any) -> Any:
        return my_momentum(tree)

    return optax.GradientTransformation(init_fn, one)


def test_a_rename_is_suggested_where_there_is_one_choice() -> None:
    saved = named_state(wrapped(momentum()))
    target = wrapped(velocity())
    plan = plan_restore(saved, target)
    (told,) = plan.suggestions
    assert (
        f"rules=[(r'state/{MINE}\\.velocity/(.*)', Rename(r'state/{MINE}.momentum/\\1'))]" in told
    )
    assert f"aliases={{'{MINE}.velocity': '{MINE}.momentum'}}" in told
    text = str(plan)
    assert text.index(told) < text.index(f"+ state/{MINE}.velocity/m/w")
    rules = [(rf"state/{MINE}.velocity/(.*)", Rename(rf"state/{MINE}.momentum/\1"))]
    renamed = plan_restore(saved, target, allow={"optimizer"}, rules=rules)
    assert renamed.is_ok
    assert not renamed.suggestions
    aliased = wrapped(velocity(), aliases={f"{MINE}.velocity": f"{MINE}.momentum"})
    assert plan_restore(saved, aliased, allow={"optimizer"}).is_ok


def test_no_rename_is_suggested_where_there_are_two_or_names_are_known() -> None:
    two = wrapped(optax.chain(velocity(), speed()))
    assert not plan_restore(named_state(wrapped(momentum())), two).suggestions
    adam, adamax = wrapped(optax.adam(0.1)), wrapped(optax.adamax(0.1))
    assert not plan_restore(named_state(adam), adamax).suggestions


def test_a_new_schedule_goes_on_from_the_step() -> None:
    params = {"w": jnp.arange(8.0).reshape(2, 4)}
    optimizer = wrapped(optax.adam(0.1))
    for _ in range(3):
        optimizer = optimizer.apply_gradient(params)
    new = wrapped(optax.adam(optax.linear_schedule(0.1, 0.0, 100)))
    plan = plan_restore(named_state(optimizer), new, allow={"optimizer", "initialise"})
    (row,) = (row for row in plan.rows if row.leaf.name == "state/schedule/count")
    assert "continues from `state/step`" in row.note
    assert int(named_state(plan.apply()).leaves["state/schedule/count"]) == 3


def test_advice_names_what_can_help() -> None:
    old, new = (optax.MultiSteps(optax.sgd(0.1, momentum=0.9, nesterov=k > 2), k) for k in (4, 2))
    plan = plan_restore(counted(wrapped(old), mini_step=3), wrapped(new))
    with pytest.raises(errors.PlanError) as caught:
        plan.check()
    assert "If this is intended" not in str(caught.value)
    assert "No `allow` admits all of that" in str(caught.value)
    assert "`allow={'optimizer'}` is needed too" in str(caught.value)
    plan = plan_restore(counted(wrapped(old), mini_step=0), wrapped(new))
    with pytest.raises(errors.PlanError) as caught:
        plan.check()
    assert str(caught.value).endswith("If this is intended, admit it: `allow={'optimizer'}`.")


def test_a_plan_that_is_not_ok_says_why() -> None:
    params = {"w": jnp.ones((2, 4)), "b": jnp.ones(4)}
    old, new = (
        OptaxWrapper(optax.masked(optax.adam(0.1), mask)).create(params)
        for mask in ({"w": True, "b": False}, {"w": False, "b": True})
    )
    plan = plan_restore(named_state(old), new)
    assert not plan.is_ok
    assert plan.reasons == (
        "`state/adam/count` and 2 more would be initialised",
        "`state/adam/count` and 2 more would be dropped",
    )
    assert plan.to_data()["reasons"] == list(plan.reasons)
    assert not plan_restore(named_state(old), old).reasons


# Moments that go on, and what enters them.


@pytest.mark.parametrize("name", ["nadam", "amsgrad"])
def test_adams_own_recurrences_go_on_once_a_switch_is_admitted(name: str) -> None:
    """Nesterov's and AMSGrad's moments are Adam's; the maximum of AMSGrad is its own."""
    adam, other = wrapped(optax.adam(0.1)), wrapped(getattr(optax, name)(0.1))
    shared = ["state/adam/count", "state/adam/mu/w", "state/adam/nu/w"]
    switch = {"nadam": "nesterov", "amsgrad": "amsgrad"}[name]
    for old, new in ((adam, other), (other, adam)):
        refused = plan_restore(named_state(old), new, allow=EVERYTHING - {"optimizer"})
        assert not refused.is_ok
        assert refused.missing_kinds == {"optimizer"}
        assert f"`{switch}` of `adam` was" in refused.changes[0]
        kinds = {"optimizer", "initialise" if new is other else "drop"}
        plan = plan_restore(named_state(old), new, allow=kinds)
        assert plan.is_ok
        rows = {row.leaf.name: row.sources for row in plan.rows if row.sources}
        assert [leaf for leaf in rows if leaf.startswith("state/adam")] == shared
        restored = named_state(plan.apply())
        for leaf in shared:
            assert (restored[leaf] == named_state(old)[leaf]).all()


@pytest.mark.parametrize(
    "before",
    [optax.scale(10.0), optax.scale_by_trust_ratio(), optax.clip_by_global_norm(1.0)],
)
def test_what_changes_the_numbers_that_enter_moments_is_named(before: Any) -> None:
    """It keeps nothing, and yet the moments that go on would be in other units than new ones."""
    plain = wrapped(optax.scale_by_adam())
    rescaled = wrapped(optax.chain(before, optax.scale_by_adam()))
    for old, new, word in ((plain, rescaled, "new"), (rescaled, plain, "gone")):
        plan = plan_restore(named_state(old), new, allow=EVERYTHING - {"optimizer"})
        assert not plan.is_ok
        assert plan.missing_kinds == {"optimizer"}
        assert plan.changes[0].endswith(f" is {word}")
        admitted = plan_restore(named_state(old), new, allow={"optimizer"})
        assert admitted.is_ok
        assert not admitted.is_exact


def test_other_dimensions_are_never_kept() -> None:
    """All that can be admitted is to begin anew."""
    saved = named_state(wrapped(optax.trace(0.9)))
    turned = tuple(
        dataclasses.replace(leaf, dimensions=(1, 0))
        if leaf.kind == "state" and leaf.shape
        else leaf
        for leaf in saved.schema.leaves
    )
    source = NamedState(saved.leaves, dataclasses.replace(saved.schema, leaves=turned))
    plan = plan_restore(source, wrapped(optax.trace(0.9)), allow=EVERYTHING)
    (row,) = (row for row in plan.rows if row.leaf.transformation)
    assert row.action == "initialised"
    assert plan.changes == (
        "`trace/w` of `trace` had the dimensions 1,0 of its parameter, has 0,1",
    )
