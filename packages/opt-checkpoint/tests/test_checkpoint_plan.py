"""What a plan says, and what applying it does."""

from __future__ import annotations

import importlib
import json
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from opt_checkpoint import NamedState, Rename, Rule, errors, named_state, plan_restore
from opt_core import FROZEN, MultiOptimizer, Optimizer
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly

pytestmark = pytest.mark.usefixtures("optax_promotion")


def params() -> dict[str, Any]:
    return {"b": jnp.ones(3), "w": jnp.ones((2, 3))}


def wrapped(tx: Any) -> Optimizer:
    return OptaxWrapper(tx).create(params())


def test_nothing_to_say_where_nothing_changed() -> None:
    optimizer = wrapped(optax.adamw(0.1))
    plan = plan_restore(named_state(optimizer), optimizer)
    assert plan.is_exact
    assert plan.is_ok
    assert plan.problems == plan.notes == ()
    assert str(plan) == "8 kept (116 bytes)"
    assert plan.check() is plan


def test_the_table_and_the_data_have_every_leaf() -> None:
    plan = plan_restore(named_state(opt.adam(0.1).create(params())), opt.sgd(0.1).create(params()))
    lines = plan.table().splitlines()
    assert lines[0].split() == ["leaf", "shape", "dtype", "action", "from", "note"]
    assert lines[1].split() == ["params/b", "[3]", "float32", "kept", "params/b"]
    assert lines[4].split() == ["state/adam/count", "[]", "int32", "dropped"]
    assert lines[5].split() == ["state/adam/mu/b", "[3]", "float32", "dropped", "(refused)"]
    assert len(lines) == 1 + 3 + 5 + 1
    data = json.loads(json.dumps(plan.to_data()))
    assert (data["is_ok"], data["allow"]) == (False, [])
    assert [row["name"] for row in data["rows"]][:3] == ["params/b", "params/w", "state/step"]
    assert {row["name"] for row in data["rows"] if row["action"] == "dropped"} == {*plan.dropped}
    assert data["notes"] == ["`adam` is gone"]
    assert (
        data["problems"]
        == list(plan.problems)
        == ["`state/adam/mu/b` and 3 more would be dropped (allow: 'drop')"]
    )


def test_the_actions_of_a_plan() -> None:
    saved = named_state(opt.adam(0.1, mu_dtype=jnp.bfloat16).create(params()))
    rules: list[Rule] = [
        ("state/trace/trace/b", Rename("state/adam/mu/b")),
        ("state/trace/trace/w", "keep"),
        ("state/adam/.*", "drop"),
    ]
    target = opt.sgd(0.1, momentum=0.9).create(params())
    plan = plan_restore(saved, target, allow={"cast", "optimizer"}, rules=rules)
    found = {row.leaf.name: row.action for row in plan.rows}
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
    assert str(plan).startswith("3 kept (40 bytes), 1 converted (12 bytes), 1 initialised")
    same = plan_restore(
        named_state(opt.adam(0.1).create(params())), target, allow={"optimizer"}, rules=rules
    )
    assert {row.leaf.name: row.action for row in same.rows}["state/trace/trace/b"] == "renamed"


def notes(old: Optimizer, new: Optimizer) -> list[str]:
    return list(plan_restore(named_state(old), new).notes)


def test_what_is_said_of_another_optimizer() -> None:
    order = [wrapped(optax.chain(*x)) for x in permutations((optax.clip(1.0), optax.trace(0.9)))]
    assert notes(*order) == ["the order `clip`, `trace` is now `trace`, `clip`"]
    told = notes(wrapped(optax.adam(0.1)), wrapped(optax.lion(0.1)))
    assert told == ["`adam` is gone", "`lion`, `add_decayed_weights` are new"]


def test_what_is_said_of_other_groups() -> None:
    adam, sgd = opt.adam(0.1), opt.sgd(0.1)

    def groups(*rules: Any) -> Optimizer:
        return MultiOptimizer.from_rules(list(rules)).create(params())

    one, two = groups(("a", ".*", adam)), groups(("a", "w", adam), ("b", "b", adam))
    assert notes(adam.create(params()), two) == ["groups `a`, `b` are new"]
    assert notes(two, groups(("a", "w", adam), ("b", "b", FROZEN))) == ["group `b` is gone"]
    assert notes(one, groups(("a", "w", adam), ("b", "b", sgd))) == ["group `b` is new"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((0.9, 0.5), (0.5, 0.9), {"ema": "ema#2", "ema#2": "ema"}),
        ((0.9, 0.5), (0.5,), {"ema": "ema#2"}),
        ((0.5,), (0.9, 0.5), {"ema": None, "ema#2": "ema"}),
        ((0.9, 0.5), (0.5, 0.8), {"ema": "ema#2", "ema#2": "ema"}),
        ((0.9, 0.5, 0.9), (0.5, 0.9, 0.9), {"ema": "ema#2", "ema#2": "ema"}),
    ],
)
def test_like_transformations_are_told_apart_by_their_settings(
    old: Any, new: Any, expected: Any
) -> None:
    one, other = (wrapped(optax.chain(*map(optax.ema, d))) for d in (old, new))
    plan = plan_restore(named_state(one), other)
    rows = [row for row in plan.target_rows if row.leaf.role == "count"]
    assert len(rows) == len(new)
    for row in rows:
        name = row.leaf.transformation
        source = expected.get(name, name)
        assert row.sources == (() if source is None else (f"state/{source}/count",))


def test_no_checkpoint_is_named() -> None:
    optimizer = opt.sgd(0.1).create({"w": jnp.ones(2)})
    wrong: list[Any] = [None, "path", {}, optimizer]
    for checkpoint in wrong:
        with pytest.raises(TypeError, match=r"`checkpoint` must be a step .* or a `NamedState`"):
            plan_restore(checkpoint, optimizer)


# What applying it does with arrays


def numbers() -> dict[str, Any]:
    return {"b": jnp.arange(3.0), "w": jnp.arange(6.0).reshape(2, 3)}


def leaves(tree: Any) -> list[Any]:
    found: list[Any] = jax.tree.leaves(tree)
    return found


def test_the_result_can_be_donated_and_the_rest_stays() -> None:
    old = opt.adam(0.1).create(numbers())
    saved, target = named_state(old), opt.adam(0.1).create(numbers())
    restored = plan_restore(saved, target).apply()
    step = jax.jit(lambda o: o.apply_gradient(o.target), donate_argnums=0)
    step(restored)
    assert not any(x.is_deleted() for x in (*leaves(old), *leaves(target)))
    again = plan_restore(saved, target, rules=[(".*", "keep")]).apply()
    step(again)
    assert not any(x.is_deleted() for x in (*leaves(old), *leaves(target)))


def test_strong_types_and_no_second_compilation() -> None:
    old = opt.adam(0.1).create(numbers())
    traces: list[None] = []

    @jax.jit
    def step(optimizer: Optimizer) -> Optimizer:
        traces.append(None)
        return optimizer.apply_gradient(optimizer.target)

    step(old)
    step(plan_restore(named_state(old), old).apply())
    step(plan_restore(named_state(old), old, rules=[("state/.*", "initialise")]).apply())
    assert len(traces) == 1


def test_nothing_is_read_before_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    read, wanted = NamedState.read, list[str]()

    def noted(self: NamedState, places: Any) -> Any:
        wanted.extend(places)
        return read(self, places)

    monkeypatch.setattr(NamedState, "read", noted)
    source, target = named_state(opt.adam(0.1).create(numbers())), opt.sgd(0.1).create(numbers())
    plan = plan_restore(source, target, allow={"drop", "optimizer"})
    assert str(plan)
    assert plan.table()
    assert wanted == []
    plan.apply()
    assert sorted(wanted) == ["params/b", "params/w", "state/step"]  # what is dropped is not


def test_what_is_initialised_sees_the_restored_parameters() -> None:
    def copying() -> Any:
        def init_fn(tree: Any) -> Any:
            return {"start": jax.tree.map(jnp.copy, tree)}

        return optax.GradientTransformation(init_fn, lambda u, s, p=None: (u, s))

    old = OptaxWrapper(optax.identity()).create(numbers())
    target = OptaxWrapper(copying()).create(jax.tree.map(jnp.zeros_like, numbers()))
    restored = plan_restore(named_state(old), target, allow={"initialise", "optimizer"}).apply()
    np.testing.assert_array_equal(restored.state.param_states["start"]["w"], numbers()["w"])


def test_an_abstract_source_has_no_values() -> None:
    optimizer = opt.adam(0.1).create(numbers())
    abstract = named_state(jax.eval_shape(lambda: optimizer))
    assert plan_restore(abstract, optimizer).is_exact
    with pytest.raises(errors.LeafError, match="the named state is abstract"):
        plan_restore(abstract, optimizer).apply()


# What did not change is restored without a word, whatever it is nested in


_RATE = optax.linear_schedule(1.0, 0.0, 100)
_LABELS = {"a": "x", "b": "y"}


def abstract(tx: Any) -> Optimizer:
    """Leaves without values: nothing can be found by agreeing counts."""
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones(3)}
    made: Optimizer = jax.eval_shape(lambda: OptaxWrapper(tx).create(params))
    return made


def groups(x: Any, y: Any) -> Any:
    return optax.partition({"x": x, "y": y}, _LABELS)


def steps(tx: Any, k: Any, **options: Any) -> Any:
    return optax.MultiSteps(tx, k, **options).gradient_transformation()


def mask(tx: Any, *names: str) -> Any:
    return optax.masked(tx, {name: name in names for name in "ab"})


def everything_in(label: str) -> Any:
    return lambda tree: jax.tree.map(lambda _: label, tree)


_OPTIMIZERS = {
    "windows in a window": steps(groups(steps(optax.sgd(0.1), 2), optax.sgd(0.1)), 3),
    "two levels": groups(
        optax.chain(
            mask(optax.adam(0.1), "a"),
            optax.partition({"q": optax.adam(_RATE), "r": optax.adam(0.1)}, everything_in("q")),
            optax.scale_by_schedule(_RATE),
        ),
        optax.sgd(_RATE, 0.9),
    ),
    "windows": steps(steps(optax.sgd(0.1, 0.9), 3), 2),
    "finite": optax.apply_if_finite(optax.apply_if_finite(optax.adam(0.1), 3), 5),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_is_restored_into_itself(name: str) -> None:
    optimizer = abstract(_OPTIMIZERS[name])
    plan = plan_restore(named_state(optimizer), optimizer)
    assert plan.is_exact, str(plan)


def test_a_group_that_took_in_a_parameter_is_not_as_it_was() -> None:
    both = {"a": "x", "b": "x"}
    before = abstract(groups(optax.adam(0.1), optax.adam(0.1)))
    after = abstract(optax.partition({"x": optax.adam(0.1), "y": optax.adam(0.1)}, both))
    rows = {row.leaf.name: row for row in plan_restore(named_state(before), after).target_rows}
    assert rows["state/groups/x/adam/count"].note.startswith(
        "reinitialised: nothing says whether its groups"
    )


def problems_of(old: Any, new: Any) -> tuple[str, ...]:
    return plan_restore(named_state(abstract(old)), abstract(new)).problems


def test_a_switch_is_seen_however_it_is_given() -> None:
    old, new = optax.trace(0.9, nesterov=np.bool_(True)), optax.trace(0.9, nesterov=False)
    assert problems_of(old, new)[0].startswith("`nesterov` of `trace` was ")
    assert not problems_of(old, optax.trace(0.9, nesterov=True))
