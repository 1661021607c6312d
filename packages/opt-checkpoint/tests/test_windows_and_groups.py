"""Half-done windows, and groups that are split and merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from checkpoint_testing import EVERYTHING
from opt_checkpoint import NamedState, Plan, Rename, Row, named_state, plan_restore
from opt_core import FROZEN, MultiOptimizer, Optimizer
from opt_optax_bridge import OptaxWrapper

contrib: Any = optax.contrib  # exports most of its names in no `__all__`

pytestmark = pytest.mark.usefixtures("optax_promotion")


def abstract(tx: Any) -> Optimizer:
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    made: Optimizer = jax.eval_shape(lambda: OptaxWrapper(tx).create(params))
    return made


def counted(tx: Any, **counts: int) -> NamedState:
    """The names of an optimizer, where the leaves whose names end so have values."""
    named = named_state(abstract(tx))
    leaves = []
    for leaf in named.schema.leaves:
        given = counts.get(leaf.name.removeprefix("state/").replace("/", "__").replace("#", "_"))
        leaves.append(dataclasses.replace(leaf, value=given) if given is not None else leaf)
    return NamedState(named.leaves, dataclasses.replace(named.schema, leaves=tuple(leaves)))


def steps(tx: Any, k: Any, **options: Any) -> Any:
    return optax.MultiSteps(tx, k, **options).gradient_transformation()


def planned(old: NamedState, new: Any) -> Plan[Any]:
    return plan_restore(old, abstract(new), allow=EVERYTHING)


def halves(k: int) -> Callable[[Any], Any]:
    return lambda step: k // 2


_SGD = optax.sgd(0.1)
_BEGUN = {"multi_steps__mini_step": 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("old", "new", "counts", "told"),
    [
        (steps(_SGD, halves(8)), steps(_SGD, halves(4)), _BEGUN, "was a function, is another"),
        (steps(_SGD, [object].pop), steps(_SGD, [object()].pop), _BEGUN, "it is not known"),
        (steps(_SGD, 4), steps(_SGD, 4, use_grad_mean=False), _BEGUN, "`use_grad_mean` was True"),
        (
            steps(steps(_SGD, 3), 2),
            steps(steps(_SGD, 3), 4),
            {"multi_steps_2__mini_step": 1},
            "its length was 2",
        ),
        (
            steps(_SGD, 4),
            optax.partition({"x": steps(_SGD, 2), "y": steps(_SGD, 4)}, {"a": "x", "b": "y"}),
            _BEGUN,
            "`state/groups/x/multi_steps/mini_step` is 1: its length was 4",
        ),
    ],
)
def test_a_window_goes_on_as_it_was_begun_or_not_at_all(
    old: Any, new: Any, counts: dict[str, int], told: str
) -> None:
    plan = planned(counted(old, **counts), new)
    assert len(plan.problems) == 1
    assert told in plan.problems[0]
    assert not planned(counted(old), new).problems


@pytest.mark.parametrize(
    ("old", "counts", "is_lost"),
    [
        (optax.chain(_SGD, optax.apply_every(4)), {"apply_every__count": 7}, True),
        (optax.chain(_SGD, optax.apply_every(4)), {"apply_every__count": 8}, False),
        (contrib.sam(_SGD, _SGD), {"sam__steps_since_sync": 1}, True),
    ],
)
def test_what_is_half_done_is_not_dropped(old: Any, counts: Any, is_lost: bool) -> None:
    plan = planned(counted(old, **counts), _SGD)
    gone = [row for row in plan.rows if row.action == "dropped"]
    assert any("would " in row.problem for row in gone) == is_lost


_P = {"x": jnp.ones(2), "y": jnp.ones(2)}
_A = "state/groups/a/multi_steps"
_SAM = contrib.sam(_SGD, optax.sgd(0.5), sync_period=3)


def trained(definition: Any, mini_steps: int) -> Optimizer:
    optimizer: Optimizer = definition.create(_P)
    for _ in range(mini_steps):
        optimizer = optimizer.apply_gradient(_P)
    return optimizer


def grouped(*rules: Any) -> MultiOptimizer:
    return MultiOptimizer.from_rules(
        [(g, pattern, tx if tx is FROZEN else OptaxWrapper(tx)) for g, pattern, tx in rules]
    )


def accumulating(k: int = 4) -> Any:
    return steps(optax.sgd(1.0), k)


def apart(tx: Any) -> MultiOptimizer:
    return grouped(("a", "x", accumulating()), ("c", "y", tx))


_TOGETHER = grouped(("a", "x|y", accumulating()))


@pytest.mark.parametrize(
    ("old", "new", "actions"),
    [
        (_TOGETHER, apart(optax.sgd(1.0)), ["drop"]),
        (apart(optax.sgd(1.0)), _TOGETHER, ["initialise", "keep"]),
    ],
    ids=["leaves", "joins"],
)
def test_a_parameter_neither_leaves_nor_joins_a_window_that_has_begun(
    old: MultiOptimizer, new: MultiOptimizer, actions: list[str]
) -> None:
    saved, target = named_state(trained(old, 3)), new.create(_P)
    plan = plan_restore(saved, target, allow=EVERYTHING)
    assert not plan.is_ok
    (row,) = (row for row in plan.rows if row.problem)
    assert row.leaf.name == f"{_A}/acc_grads/y"
    assert f"`{_A}/mini_step` is 3" in row.problem
    assert "complete it first" in row.problem
    for action in actions:
        rules: Any = [(f"{_A}/acc_grads/y", action)]
        assert plan_restore(saved, target, allow=EVERYTHING, rules=rules).is_ok
    assert plan_restore(named_state(trained(old, 4)), target, allow=EVERYTHING).is_ok


def test_a_parameter_takes_its_window_along() -> None:
    new = apart(accumulating()).create(_P)
    plan = plan_restore(named_state(trained(_TOGETHER, 3)), new, allow=EVERYTHING)
    after = plan.apply().apply_gradient(_P)
    expected = trained(_TOGETHER, 4)
    jax.tree.map(np.testing.assert_array_equal, after.target, expected.target)


@pytest.mark.parametrize("tx", [FROZEN, optax.set_to_zero()], ids=["frozen", "zero"])
def test_a_parameter_that_is_no_longer_trained_leaves_its_window(tx: Any) -> None:
    new = apart(tx).create(_P)
    assert plan_restore(named_state(trained(_TOGETHER, 3)), new, allow=EVERYTHING).is_ok


def test_no_parameter_leaves_or_joins_other_windows_that_have_begun() -> None:
    for tx, field in ((optax.apply_every(4), "grad_acc"), (_SAM, "cache")):
        one, both = grouped(("a", "x", tx), ("c", "y", _SGD)), grouped(("a", "x|y", tx))
        gone = plan_restore(named_state(trained(both, 1)), one.create(_P), allow=EVERYTHING).rows
        (left,) = (x.leaf for x in gone if x.problem)
        rows = plan_restore(named_state(trained(one, 1)), both.create(_P), allow=EVERYTHING).rows
        (joined,) = (row.leaf for row in rows if row.problem)
        assert left.name == joined.name
        assert left.path[-2:] == (field, "y")


# Groups become one: what they agree about goes on, bit for bit, and nothing else does


def in_groups(x: Any, y: Any, steps: int) -> Optimizer:
    return trained(MultiOptimizer.from_rules([("a", "x", x), ("b", "y", y)]), steps)


def keeping(value: Any) -> OptaxWrapper:
    def init_fn(params: Any) -> Any:
        return {"kept": value}

    return OptaxWrapper(optax.GradientTransformation(init_fn, lambda u, s, p=None: (u, s)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.float32(0.0), jnp.float32(-0.0)),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.float32(jnp.nan), jnp.float32(1.0)),
        (jnp.float32([1.0]), jnp.float32([2.0])),
    ],
)
def test_scalars_are_compared_by_their_bits(one: Any, other: Any) -> None:
    def merged(value: Any) -> Row:
        old = named_state(in_groups(keeping(one), keeping(value), steps=0))
        plan = plan_restore(old, keeping(one).create(_P), allow=EVERYTHING)
        (row,) = (row for row in plan.target_rows if row.leaf.path[-1] == "kept")
        return row

    same, apart = merged(one), merged(other)
    assert same.kinds == ("regroup",)
    assert len(same.sources) == 2
    if apart.leaf.role == "key":  # any of several makes random numbers that are as good
        assert apart.sources == same.sources[:1]
    else:
        assert apart.note == "reinitialised: its groups do not agree about `kept`"


def test_keys_are_not_cast() -> None:
    key, number = keeping(jax.random.key(0)).create(_P), keeping(jnp.float32(0)).create(_P)
    for old, new in ((key, number), (number, key)):
        plan = plan_restore(named_state(old), new, allow=EVERYTHING)
        assert not plan.is_ok
        assert "keys cannot be cast" in str(plan)


@pytest.mark.parametrize(
    "rule",
    [("state/adam/mu/x", Rename("state/groups/a/adam/mu/x")), ("state/adam/mu/x", "keep")],
)
def test_no_count_starts_anew_beside_a_moment_that_a_rule_keeps(rule: Any) -> None:
    """Group `a` has made 2 steps, group `b` 1, when they become one."""
    two = MultiOptimizer.from_rules([("a", "x", opt.adam(0.1)), ("b", "y", opt.adam(0.1))])
    half = MultiOptimizer.from_rules([("a", "x", opt.adam(0.1))], rest=FROZEN)
    old = plan_restore(named_state(trained(half, 1)), two.create(_P), allow=EVERYTHING).apply()
    source, new = named_state(old.apply_gradient(_P)), opt.adam(0.1).create(_P)
    plan = plan_restore(source, new, allow=EVERYTHING, rules=[rule])
    (wrong,) = (row for row in plan.rows if row.problem)
    assert wrong.leaf.name == "state/adam/count"
    assert wrong.problem == (
        "reinitialised: its groups do not agree about `count`: `a` 2, `b` 1, while a rule keeps "
        "`state/adam/mu/x`: give this a rule too"
    )
    assert not plan.is_ok
    assert not plan_restore(source, new, allow=EVERYTHING, rules=[rule, (".*/count", "cast")]).is_ok
