"""Groups become one: what they agree about goes on, bit for bit, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from opt_checkpoint import NamedState, Plan, Rename, named_state, plan_restore
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_core import MultiOptimizer, Optimizer
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

_P = {"x": jnp.ones(2), "y": jnp.ones(2)}
_RATE = optax.linear_schedule(0.0, 1e-2, 100)
_MERGE = {"regroup", "optimizer"}
_ALL = {"initialise", "drop", "cast", "optimizer", "regroup"}


def injected(**options: Any) -> OptaxWrapper:
    return OptaxWrapper(optax.inject_hyperparams(optax.adamw)(learning_rate=_RATE, **options))


def trained(x: Any, y: Any, steps: int = 5) -> Optimizer:
    optimizer: Optimizer = MultiOptimizer.from_rules([("a", "x", x), ("b", "y", y)]).create(_P)
    for _ in range(steps):
        optimizer = optimizer.apply_gradient(_P)
    return optimizer


def source_of(old: Optimizer, checkpointer: Checkpointer, is_on_disk: bool, step: int = 5) -> Any:
    """A state in memory, or as a step on the disk."""
    if not is_on_disk:
        return named_state(old)
    checkpointer.save(step, old)
    checkpointer.wait()
    return checkpointer.at(step)


def notes(plan: Plan[Any]) -> dict[str, str]:
    return {row.leaf.name.removeprefix("state/"): row.note for row in plan.rows}


def test_a_schedule_goes_on_where_groups_agree(tmp_path: Path) -> None:
    old = trained(injected(), injected())
    one: Optimizer = injected().create(_P)
    for _ in range(5):
        one = one.apply_gradient(_P)
    with Checkpointer(tmp_path) as checkpointer:
        source = source_of(old, checkpointer, is_on_disk=True)
        plan = plan_restore(source, injected().create(_P), allow=_MERGE)
        assert plan.is_ok, str(plan)
        restored = plan.apply()
    assert notes(plan)["inject_hyperparams/hyperparams/learning_rate"] == "the groups agree"
    expected, found = named_state(one), named_state(restored)
    assert expected.keys() == found.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_the_leaf_that_differs_is_named() -> None:
    old = trained(injected(), injected())
    groups = old.state.param_states
    changed = {**groups["b"].hyperparams, "b1": jnp.nextafter(jnp.float32(0.9), 1)}
    states = type(groups)({**groups, "b": groups["b"]._replace(hyperparams=changed)})
    old = old.replace(state=old.state.replace(param_states=states))
    found = notes(plan_restore(named_state(old), injected().create(_P), allow=_ALL))
    told = found["inject_hyperparams/hyperparams/b1"]
    assert told == "its groups do not agree about `hyperparams/b1`"
    for name in ("inject_hyperparams/count", "inject_hyperparams/hyperparams/b2", "adam/count"):
        assert found[name] == "the groups agree"


def keeping(value: Any) -> OptaxWrapper:
    def init_fn(params: Any) -> Any:
        return {"kept": value}

    return OptaxWrapper(optax.GradientTransformation(init_fn, lambda u, s, p=None: (u, s)))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.float32(0.0), jnp.float32(-0.0)),
        (jnp.bfloat16(1.0), jnp.bfloat16(2.0)),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.float32(jnp.nan), jnp.float32(1.0)),
        (jnp.float32([1.0]), jnp.float32([2.0])),
    ],
)
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_scalars_are_compared_by_their_bits(
    tmp_path: Path, one: Any, other: Any, is_on_disk: bool
) -> None:
    def merged(value: Any, step: int) -> Plan[Any]:
        old = trained(keeping(one), keeping(value), steps=0)
        source = source_of(old, checkpointer, is_on_disk, step)
        return plan_restore(source, keeping(one).create(_P), allow=_ALL)

    with Checkpointer(tmp_path) as checkpointer:
        (same,) = (row for row in merged(one, 0).rows if row.leaf.path[-1] == "kept")
        (apart,) = (row for row in merged(other, 1).rows if row.leaf.path[-1] == "kept")
    assert same.kinds == ("regroup",)
    assert len(same.sources) == 2
    if apart.leaf.role == "key":  # any of several makes random numbers that are as good
        assert apart.sources == same.sources[:1]
    else:
        assert apart.note == "reinitialised: its groups do not agree about `kept`"


def disagreeing() -> NamedState:
    """Group `a` has made 2 steps, group `b` none."""
    old = named_state(trained(opt.adam(0.1), opt.adam(0.1), steps=2))
    leaves = [
        dataclasses.replace(leaf, value=0) if leaf.name == "state/groups/b/adam/count" else leaf
        for leaf in old.schema.leaves
    ]
    values = dict(old.leaves) | {"state/groups/b/adam/count": jnp.int32(0)}
    return NamedState(values, dataclasses.replace(old.schema, leaves=tuple(leaves)))


_MOMENT: Any = (r"state/adam/mu/x", Rename("state/groups/a/adam/mu/x"))


@pytest.mark.parametrize("rule", [_MOMENT, ("state/adam/mu/x", "keep")])
def test_no_count_starts_anew_beside_a_moment_that_a_rule_keeps(rule: Any) -> None:
    source, new = disagreeing(), opt.adam(0.1).create(_P)
    plan = plan_restore(source, new, allow=_ALL, rules=[rule])
    assert not plan.is_ok
    (wrong,) = (row for row in plan.rows if row.problem)
    assert wrong.leaf.name == "state/adam/count"
    assert wrong.problem == (
        "reinitialised: its groups do not agree about `count`: `a` 2, `b` 0, while a rule keeps "
        "`state/adam/mu/x`: give this a rule too"
    )
    assert not plan_restore(source, new, allow=_ALL, rules=[rule, (".*/count", "cast")]).is_ok


@pytest.mark.parametrize(
    ("action", "count"),
    [("initialise", 0), ("keep", 0), (Rename("state/groups/a/adam/count"), 2)],
)
def test_a_rule_says_what_becomes_of_the_count_too(action: Any, count: int) -> None:
    rules = [_MOMENT, ("state/adam/count", action)]
    new = opt.adam(0.1).create(_P)
    restored = named_state(plan_restore(disagreeing(), new, allow=_ALL, rules=rules).apply())
    assert int(restored["state/adam/count"]) == count
    assert float(restored["state/adam/mu/x"][0]) > 0
    assert plan_restore(disagreeing(), new, allow=_ALL).is_ok
