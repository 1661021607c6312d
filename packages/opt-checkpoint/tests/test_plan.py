"""What a plan says."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
import pytest
from opt_checkpoint import (
    NamedState,
    Rename,
    Rule,
    Schema,
    Unstack,
    errors,
    named_state,
    plan_restore,
)
from opt_core import FROZEN, MultiOptimizer, Optimizer, regroup
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")


def params() -> dict[str, Any]:
    return {"b": jnp.ones(3), "w": jnp.ones((2, 3))}


def wrapped(tx: Any) -> Optimizer:
    return OptaxWrapper(tx).create(params())


def changed(old: Optimizer, new: Optimizer) -> list[str]:
    return list(plan_restore(named_state(old), new).changes)


def test_nothing_to_say_where_nothing_changed() -> None:
    optimizer = wrapped(optax.adamw(0.1))
    plan = plan_restore(named_state(optimizer), optimizer)
    assert plan.is_exact
    assert plan.is_ok
    assert plan.diff() == ""
    assert not plan.missing_kinds
    assert str(plan) == plan.summary() == "8 kept (116 bytes)"
    assert plan.check() is plan


def test_the_table_has_every_leaf() -> None:
    plan = plan_restore(named_state(opt.adam(0.1).create(params())), opt.sgd(0.1).create(params()))
    lines = plan.table().splitlines()
    assert lines[0].split() == ["leaf", "shape", "dtype", "action", "from", "note"]
    assert lines[1].split() == ["params/b", "[3]", "float32", "kept", "params/b"]
    assert lines[4].split() == ["state/adam/count", "[]", "int32", "dropped", "(refused)"]
    assert len(lines) == 1 + 3 + 5 + 1


def test_a_plan_is_data() -> None:
    plan = plan_restore(named_state(opt.adam(0.1).create(params())), opt.sgd(0.1).create(params()))
    data = json.loads(json.dumps(plan.to_data()))
    assert data["is_ok"] is False
    assert data["allow"] == []
    assert [row["name"] for row in data["rows"]] == ["params/b", "params/w", "state/step"]
    assert {row["name"] for row in data["dropped"]} >= {"state/adam/mu/w"}
    assert data["changes"] == ["`adam` is gone"]


def test_a_plan_speaks_as_surgery_does() -> None:
    """One report: the same words for the same change, in memory and from a checkpoint."""
    old = MultiOptimizer.from_rules([("all", ".*", opt.adam(0.1))]).create(params())
    new = MultiOptimizer.from_rules([("all", ".*", opt.lion(0.1))])
    kinds = {"initialise", "drop", "optimizer"}
    plan = plan_restore(named_state(old), new.create(params()), allow=kinds)
    _, told = regroup(old, new, allow=kinds)
    for action in ("kept", "renamed", "converted", "initialised", "dropped"):
        ours = [change.leaf.key for change in plan.report.changes if change.action == action]
        assert ours == [change.leaf.key for change in told.changes if change.action == action]
    assert plan.report.dropped == tuple(row.leaf.name for row in plan.dropped)
    assert str(plan.report).startswith("initialised 3\n  state/groups/all/lion/count")


def test_the_actions_of_a_plan() -> None:
    saved = named_state(opt.adam(0.1, mu_dtype=jnp.bfloat16).create(params()))
    rules: list[Rule] = [
        ("state/trace/trace/b", Rename("state/adam/mu/b")),
        ("state/trace/trace/w", "keep"),
        ("state/adam/.*", "drop"),
    ]
    target = opt.sgd(0.1, momentum=0.9).create(params())
    plan = plan_restore(saved, target, allow={"cast", "optimizer"}, rules=rules)
    found = {row.leaf.name: row.action for row in (*plan.rows, *plan.dropped)}
    assert found == {
        "params/b": "kept",
        "params/w": "kept",
        "state/step": "kept",
        "state/trace/trace/b": "converted",
        "state/trace/trace/w": "initialised",
        "state/adam/count": "dropped",
        "state/adam/mu/w": "dropped",
        "state/adam/nu/b": "dropped",
        "state/adam/nu/w": "dropped",
    }
    assert plan.summary().startswith("3 kept (40 bytes), 1 converted (12 bytes), 1 initialised")
    same = plan_restore(
        named_state(opt.adam(0.1).create(params())), target, allow={"optimizer"}, rules=rules
    )
    assert {row.leaf.name: row.action for row in same.rows}["state/trace/trace/b"] == "renamed"


def test_what_is_in_the_way_comes_first_and_is_not_cut_off() -> None:
    many = {f"p{i:03}": jnp.ones(1) for i in range(60)}
    saved = named_state(opt.sgd(0.1).create(many))
    plan = plan_restore(saved, opt.sgd(0.1).create(params()), rules=[("params/p.*", "drop")])
    lines = str(plan).splitlines()
    assert lines[1].startswith("!+ params/b")
    assert lines[2].startswith("!+ params/w")
    assert lines[-1] == "... and 22 more: `table()` has all"
    refused = str(plan_restore(saved, opt.sgd(0.1).create(params())))
    assert sum(line.startswith("!- params/p") for line in refused.splitlines()) == 60


def test_an_error_says_what_to_do() -> None:
    saved = named_state(opt.adam(0.1).create(params()))
    with pytest.raises(errors.PlanError) as caught:
        plan_restore(saved, opt.lion(0.1).create(params()), allow={"drop"}).apply()
    text = str(caught.value)
    assert text.startswith("the checkpoint does not fit the optimizer as it is: 3 leaves\n")
    assert text.endswith(
        "admit it: `allow={'initialise', 'optimizer'}`, or `rules=` for single leaves."
    )
    assert caught.value.plan.missing_kinds == {"initialise", "optimizer"}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (optax.adam(0.1), optax.adam(0.2, b1=0.8, eps=1e-3), []),
        (optax.adafactor(0.1), optax.adafactor(0.2), []),
        (optax.adam(0.1), optax.nadam(0.1), ["`nesterov` of `adam` was False, is True"]),
        (optax.ema(0.9), optax.ema(0.8), []),
        (
            optax.chain(optax.ema(0.9), optax.ema(0.5)),
            optax.chain(optax.ema(0.8), optax.ema(0.5)),
            ["`decay` of `ema` was 0.9, is 0.8"],
        ),
        (
            optax.chain(optax.clip(1.0), optax.trace(0.9)),
            optax.chain(optax.trace(0.9), optax.clip(1.0)),
            ["the order `clip`, `trace` is now `trace`, `clip`"],
        ),
        (
            optax.MultiSteps(optax.trace(0.9), 2),
            optax.MultiSteps(optax.trace(0.9), 3),
            [],
        ),
        (
            optax.adam(0.1),
            optax.lion(0.1),
            ["`adam` is gone", "`lion`, `add_decayed_weights` are new"],
        ),
    ],
)
def test_changes_of_an_optimizer(old: Any, new: Any, told: list[str]) -> None:
    assert changed(wrapped(old), wrapped(new)) == told


def test_changes_of_groups() -> None:
    adam, sgd = opt.adam(0.1), opt.sgd(0.1)

    def groups(*rules: Any) -> Optimizer:
        return MultiOptimizer.from_rules(list(rules)).create(params())

    one, two = groups(("a", ".*", adam)), groups(("a", "w", adam), ("b", "b", adam))
    plain = adam.create(params())
    assert changed(plain, two) == ["groups `a`, `b` are new"]
    assert changed(two, plain) == ["groups `a`, `b` are gone"]
    assert changed(one, two) == ["group `b` is new"]
    assert changed(two, groups(("a", "w", adam), ("b", "b", FROZEN))) == ["group `b` is gone"]
    assert changed(one, groups(("c", ".*", adam))) == ["group `a` is gone", "group `c` is new"]
    assert changed(two, groups(("a", "w", adam), ("b", "b", sgd))) == [
        "`adam` is gone in group `b`"
    ]
    assert changed(one, groups(("a", "w", adam), ("b", "b", sgd))) == [
        "group `b` is new",
        "`scale` is new in group `b`",
    ]


def test_an_unknown_optimizer_is_not_compared() -> None:
    saved = named_state(wrapped(optax.adam(0.1)))
    unknown = NamedState(saved.leaves, Schema(saved.schema.leaves))
    assert plan_restore(unknown, wrapped(optax.sgd(0.1))).changes == ()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((0.9, 0.5), (0.9, 0.5), {}),
        ((0.9, 0.5), (0.5, 0.9), {"ema": "ema#2", "ema#2": "ema"}),
        ((0.9, 0.5), (0.5,), {"ema": "ema#2"}),
        ((0.5,), (0.9, 0.5), {"ema": None, "ema#2": "ema"}),
        ((0.9, 0.5), (0.8, 0.5), {}),
        ((0.9, 0.5), (0.5, 0.8), {"ema": "ema#2", "ema#2": "ema"}),
        ((0.9, 0.9), (0.9,), {}),
        ((0.9, 0.5, 0.9), (0.5, 0.9, 0.9), {"ema": "ema#2", "ema#2": "ema"}),
        ((0.9,), (0.5,), {}),
    ],
)
def test_like_transformations_are_told_apart_by_their_settings(
    old: Any, new: Any, expected: Any
) -> None:
    one, other = (wrapped(optax.chain(*map(optax.ema, d))) for d in (old, new))
    rows = [row for row in plan_restore(named_state(one), other).rows if row.leaf.role == "count"]
    assert len(rows) == len(new)
    for row in rows:
        name = row.leaf.transformation
        source = expected.get(name, name)
        assert row.sources == (() if source is None else (f"state/{source}/count",))


def test_wrong_arguments_are_named() -> None:
    optimizer = opt.sgd(0.1).create({"w": jnp.ones(2)})
    wrong: Any = [None, "path", {}, optimizer]
    for checkpoint in wrong:
        with pytest.raises(TypeError, match=r"`checkpoint` must be a step .* or a `NamedState`"):
            plan_restore(checkpoint, optimizer)
    target: Any = optimizer.state
    with pytest.raises(
        TypeError, match=r"`target`: expected an `opt_core.Optimizer`, .*; found OptimizerState"
    ):
        plan_restore(named_state(optimizer), target)


def test_a_slice_is_shown_with_its_axis() -> None:
    saved = named_state(opt.sgd(0.1).create({"k": jnp.zeros((2, 3, 4))}))
    shown = []
    for axis, shape in ((0, (3, 4)), (1, (2, 4)), (-1, (2, 3)), (-2, (2, 4))):
        target = opt.sgd(0.1).create({"k1": jnp.zeros(shape)})
        rules: list[Rule] = [
            (r"params/k(\d)", Unstack("params/k", r"\1", axis)),
            ("params/k", "drop"),
        ]
        row = plan_restore(saved, target, rules=rules).diff().splitlines()[0]
        shown.append(row.partition("<- ")[2])
    assert shown == ["params/k[1]", "params/k[:, 1]", "params/k[:, :, 1]", "params/k[:, 1]"]
