"""What a plan says and refuses, what it takes to admit it, and what applying it does."""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from checkpoint_testing import EVERYTHING, structure
from opt_checkpoint import (
    NamedState,
    Rename,
    Stack,
    Unstack,
    errors,
    named_state,
    plan_restore,
)
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define


def params() -> dict[str, Any]:
    return {"b": jnp.arange(3.0), "w": jnp.arange(6.0).reshape(2, 3) / 4}


def numbered(optimizer: Optimizer) -> Optimizer:
    """Every leaf of the state with values of its own."""
    leaves, structure = jax.tree.flatten(optimizer.state)
    made = [
        (jnp.arange(x.size).reshape(x.shape) + i + 1).astype(x.dtype) for i, x in enumerate(leaves)
    ]
    return optimizer.replace(state=jax.tree.unflatten(structure, made))


def wrapped(tx: Any, of: Any = None) -> Optimizer:
    return OptaxWrapper(tx).create(params() if of is None else of)


def refusal(saved: Any, target: Optimizer, **options: Any) -> str:
    with pytest.raises(errors.PlanError) as caught:
        plan_restore(saved, target, **options).apply()
    assert not caught.value.plan.is_ok
    return str(caught.value)


def assert_bits(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def keeping(*fields: str) -> Any:
    """A transformation of a user's, whose fields change from version to version."""

    def init_fn(tree: Any) -> Any:
        return {name: jax.tree.map(jnp.zeros_like, tree) for name in fields}

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return updates, state

    return optax.GradientTransformation(init_fn, update_fn)


def test_the_table_and_the_data_have_every_leaf() -> None:
    plan = plan_restore(named_state(opt.adam(0.1).create(params())), opt.sgd(0.1).create(params()))
    lines = plan.table().splitlines()
    assert len(lines) == 1 + 3 + 5 + 1
    assert lines[0].split() == ["leaf", "shape", "dtype", "action", "from", "note"]
    assert lines[1].split() == ["params/b", "[3]", "float32", "kept", "params/b"]
    assert lines[5].split() == ["state/adam/mu/b", "[3]", "float32", "dropped", "(refused)"]
    data = json.loads(json.dumps(plan.to_data()))
    assert (data["is_ok"], data["allow"], data["notes"]) == (False, [], ["`adam` is gone"])
    assert {row["name"] for row in data["rows"] if row["action"] == "dropped"} == {*plan.dropped}
    told = ["`state/adam/mu/b` and 3 more would be dropped (allow: 'drop')"]
    assert data["problems"] == list(plan.problems) == told


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((0.9, 0.5), (0.5, 0.9), {"ema": "ema#2", "ema#2": "ema"}),
        ((0.9, 0.5), (0.5,), {"ema": "ema#2"}),
        ((0.5,), (0.9, 0.5), {"ema": None, "ema#2": "ema"}),
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
    wrong: list[Any] = [None, "path", [], optimizer]
    for checkpoint in wrong:
        with pytest.raises(TypeError, match=r"`checkpoint` must be a step .* or a `NamedState`"):
            plan_restore(checkpoint, optimizer)
    with pytest.raises(TypeError, match="an array for each name, such as `params/w`; `params` is"):
        plan_restore({"params": {"w": jnp.ones(2)}}, optimizer)


# What applying it does with arrays


def test_nothing_is_read_before_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    read, wanted = NamedState.read, list[str]()

    def noted(self: NamedState, places: Any) -> Any:
        wanted.extend(places)
        return read(self, places)

    monkeypatch.setattr(NamedState, "read", noted)
    source, target = named_state(opt.adam(0.1).create(params())), opt.sgd(0.1).create(params())
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

    old = OptaxWrapper(optax.identity()).create(params())
    target = OptaxWrapper(copying()).create(jax.tree.map(jnp.zeros_like, params()))
    restored = plan_restore(named_state(old), target, allow={"initialise", "optimizer"}).apply()
    np.testing.assert_array_equal(restored.state.param_states["start"]["w"], params()["w"])


# The acceptance cases


def test_b1_a_field_that_is_added_removed_or_renamed_is_named_and_migrates() -> None:
    """State fields come and go: the error has their path, a rule or a kind lets it pass."""
    old = numbered(wrapped(keeping("a", "b")))
    saved, b = named_state(old), old.state.param_states["b"]["w"]
    more, other = wrapped(keeping("a", "b", "c")), wrapped(keeping("a", "z"))

    assert f"+ state/{MINE}.keeping/c/w float32[2, 3]" in refusal(saved, more)
    added = plan_restore(saved, more, allow={"initialise", "optimizer"}).apply()
    assert_bits(added.state.param_states["b"]["w"], b)
    assert not np.any(np.asarray(added.state.param_states["c"]["w"]))

    assert f"- state/{MINE}.keeping/c/w float32[2, 3]" in refusal(named_state(added), old)
    removed = plan_restore(named_state(added), old, allow={"drop", "optimizer"}).apply()
    assert_bits(removed.state.param_states["b"]["w"], b)

    told = refusal(saved, other)
    assert f"+ state/{MINE}.keeping/z/w" in told
    assert f"- state/{MINE}.keeping/b/w" in told
    rules = [(f"state/{MINE}.keeping/z/(.*)", Rename(rf"state/{MINE}.keeping/b/\1"))]
    renamed = plan_restore(saved, other, allow={"optimizer"}, rules=rules).apply()
    assert_bits(renamed.state.param_states["z"]["w"], b)


def test_b3_another_optimizer_of_the_same_shapes_is_refused() -> None:
    """Adam's state is nobody else's; two transformations of one shape do not exchange theirs."""
    saved = named_state(opt.adam(0.1).create(params()))
    for same in (opt.adam, opt.adamw, opt.lamb):  # what comes behind the moments differs
        assert plan_restore(saved, same(0.1).create(params())).is_ok
    for other in (opt.adabelief, opt.adamax, opt.nadam, opt.radam, opt.yogi):
        assert refusal(saved, other(0.1).create(params()))
    yogi, adam = optax.scale_by_yogi(), optax.scale_by_adam()
    saved = named_state(numbered(wrapped(optax.chain(yogi, adam))))
    target = wrapped(optax.chain(adam, yogi))
    assert "`yogi` acted before `adam`, and acts after it" in refusal(saved, target)
    moved = plan_restore(saved, target, allow={"optimizer"}).apply()
    assert_bits(moved.state.param_states[0].mu["w"], saved["state/adam/mu/w"])
    assert_bits(moved.state.param_states[1].mu["w"], saved["state/yogi/mu/w"])
    inject = optax.inject_hyperparams
    saved = named_state(wrapped(inject(optax.adam)(0.1)))
    assert "`adam` is gone" in refusal(saved, wrapped(inject(optax.yogi)(0.1)))
    nesterov = wrapped(inject(optax.adam)(0.1, nesterov=True))
    assert "`nesterov` of `adam` was False, is True" in refusal(saved, nesterov)


def test_b4_what_keeps_no_state_is_added_to_a_chain_and_removed() -> None:
    """Positions in a chain do not matter: the plan names the transformation, not a path."""
    old = numbered(wrapped(optax.chain(optax.clip(1.0), optax.adam(0.1))))
    plain = wrapped(optax.adam(0.1))
    plan = plan_restore(named_state(old), plain)
    assert plan.notes == ("`clip` is gone",)
    removed = plan.apply()
    assert_bits(removed.state.param_states[0].mu["w"], old.state.param_states[1][0].mu["w"])
    # `identity` does nothing: that it is there is no other optimizer.
    with_identity = wrapped(optax.chain(optax.identity(), optax.adam(0.1)))
    added = plan_restore(named_state(removed), with_identity).apply()
    assert_bits(added.state.param_states[1][0].mu["w"], old.state.param_states[1][0].mu["w"])


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode()])
def test_b5_an_array_does_not_become_nothing_nor_nothing_an_array(nothing: Any) -> None:
    """`None` and `MaskedNode` against an array, both ways: refused until it is admitted."""
    full = numbered(wrapped(keeping("a", "b")))
    state = full.state.param_states
    states = {**state, "a": {**state["a"], "w": nothing}}
    partial = full.replace(state=full.state.replace(param_states=states))
    assert f"- state/{MINE}.keeping/a/w float32[2, 3]" in refusal(named_state(full), partial)
    dropped = plan_restore(named_state(full), partial, allow={"drop"}).apply()
    assert structure(dropped) == structure(partial)

    assert f"+ state/{MINE}.keeping/a/w float32[2, 3]" in refusal(named_state(partial), full)
    filled = plan_restore(named_state(partial), full, allow={"initialise"}).apply()
    assert structure(filled) == structure(full)
    assert_bits(filled.state.param_states["a"]["w"], jnp.zeros((2, 3)))


def test_b6_a_leaf_that_is_absent_is_an_error_or_as_init_makes_it() -> None:
    """Part of a checkpoint into an abstract target: no leaf stays abstract."""
    old = numbered(wrapped(optax.adam(0.1)))
    saved = without(named_state(old), "state/adam/nu/w", "state/adam/count")
    target = jax.eval_shape(lambda: wrapped(optax.adam(0.1)))
    assert "+ state/adam/nu/w float32[2, 3]" in refusal(saved, target)
    restored = plan_restore(saved, target, allow={"initialise"}).apply()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert_bits(restored.state.param_states[0].nu["w"], jnp.zeros((2, 3)))
    assert_bits(restored.state.param_states[0].mu["w"], old.state.param_states[0].mu["w"])
    # What only the caller can give is asked for.
    missing = without(named_state(old), "params/w")
    told = refusal(missing, target, allow={"initialise"})
    assert "params/w" in told
    assert "give arrays for new parameters" in told


def without(named: NamedState, *names: str) -> NamedState:
    leaves = {name: leaf for name, leaf in named.items() if name not in names}
    infos = tuple(leaf for leaf in named.schema.leaves if leaf.name not in names)
    return NamedState(leaves, dataclasses.replace(named.schema, leaves=infos))


def test_b7_a_rule_that_matches_nothing_is_an_error() -> None:
    """A mistyped pattern or source never leaves a leaf as the target has it."""
    saved = named_state(numbered(wrapped(optax.adam(0.1))))
    target = wrapped(optax.adam(0.1))
    wrong: list[Any] = [
        ("state/adm/.*", "initialise"),
        ("state/adm/.*", "drop"),
        ("params/layers/.*", Stack("params/layers_{i}")),
        ("state/adam/mu", Rename("state/adam/nu")),  # has to match the whole name
    ]
    for rule in wrong:
        with pytest.raises(ValueError, match="matches no leaf"):
            plan_restore(saved, target, rules=[rule])
    rules = [("params/w", Rename("params/W"))]
    told = refusal(saved, target, allow=EVERYTHING, rules=rules)
    assert "params/w float32[2, 3]: the checkpoint has no `params/W`, as a rule says" in told
    for rule in [
        ("params/w", Stack("params/b{i}")),
        ("params/b", Unstack("params/w", "x")),
        ("params/b", Unstack("params/w", "2")),
        ("params/b", Unstack("params/w", "0", axis=2)),
    ]:
        assert "params/" in refusal(saved, target, allow=EVERYTHING, rules=[rule])


def test_b11_what_the_target_has_no_place_for_is_an_error() -> None:
    """An extra leaf in the checkpoint is refused by default, with a schema and without."""
    extra = named_state(numbered(wrapped(optax.adam(0.1), params() | {"old": jnp.ones(2)})))
    target = wrapped(optax.adam(0.1))
    told = refusal(extra, target)
    for name in ("params/old", "state/adam/mu/old", "state/adam/nu/old"):
        assert f"!- {name} float32[2]" in told
    with pytest.raises(errors.PlanError, match="params/old"):
        plan_restore(dict(extra), target).apply()
    restored = plan_restore(extra, target, rules=[(".*/old", "drop")]).apply()
    assert set(restored.target) == {"b", "w"}


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (1, 2, 3)])
def test_c1_another_shape_is_an_error_with_both(shape: tuple[int, ...]) -> None:
    """Bigger, smaller, transposed, another rank: both shapes are named; reshaping is explicit."""
    saved = named_state(numbered(wrapped(optax.adam(0.1))))
    target = wrapped(optax.adam(0.1), params() | {"w": jnp.zeros(shape)})
    told = refusal(saved, target, allow=EVERYTHING - {"reshape"})
    line = next(line for line in told.splitlines() if "params/w" in line)
    assert str(list(shape)) in line
    assert "[2, 3]" in line
    if np.prod(shape) == 6:
        restored = plan_restore(saved, target, allow={"reshape"}).apply()
        assert_bits(restored.target["w"], params()["w"].reshape(shape))
        assert_bits(
            restored.state.param_states[0].nu["w"].ravel(), saved["state/adam/nu/w"].ravel()
        )
    else:
        assert "reshape" not in plan_restore(saved, target).missing_words


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (np.float32(3), "int32", True),
        (np.float32(3.5), "int32", False),
        (np.int32(2**24 + 1), "float32", False),
        (np.int32(-1), "uint32", False),
        (np.float32(1 / 3), "bfloat16", True),
        (np.float32(1e-9), "float16", False),  # it would become 0
        (np.float32(1e-39), "float16", True),  # subnormal: devices take it for 0
        (np.complex64(1), "float32", None),
    ],
)
def test_c2_another_dtype_is_an_error_unless_every_value_fits(
    value: Any, dtype: str, fits: bool | None
) -> None:
    """Nothing is cast unless it is admitted, and then only where no value is lost."""
    saved = named_state(wrapped(optax.identity(), {"x": jnp.asarray([value, value])}))
    target = wrapped(optax.identity(), {"x": jnp.zeros(2, dtype)})
    told = refusal(saved, target)
    assert f"params/x {dtype}[2]" in told
    assert str(saved["params/x"].dtype) in told
    plan = plan_restore(saved, target, allow={"cast"})
    if fits is None:
        assert "an imaginary part would be lost" in refusal(saved, target, allow={"cast"})
    elif fits:
        with np.errstate(invalid="ignore"):
            expected = np.asarray([value, value]).astype(jnp.dtype(dtype))
        assert_bits(plan.apply().target["x"], expected)
    else:
        with pytest.raises(errors.LeafError, match="`params/x`: a value does not fit"):
            plan.apply()
    assert_bits(
        plan_restore(saved, target, rules=[("params/x", "keep")]).apply().target["x"],
        jnp.zeros(2, dtype),
    )


def test_c3_64_bits_are_not_truncated_where_jax_has_32() -> None:
    """A file of 64 bits in a process without `jax_enable_x64`: an error for what does not fit."""
    optimizer = wrapped(optax.identity(), {"x": jnp.zeros((), jnp.int32)})
    named = named_state(optimizer)
    infos = tuple(
        dataclasses.replace(leaf, dtype="int64", value=None) if leaf.name == "params/x" else leaf
        for leaf in named.schema.leaves
    )
    for value in (2**31 - 1, 2**33 + 5):
        schema = dataclasses.replace(named.schema, leaves=infos)
        saved = NamedState({**named, "params/x": np.asarray(value)}, schema)
        assert "int64 -> int32" in refusal(saved, optimizer)
        plan = plan_restore(saved, optimizer, allow={"cast"})
        if value < 2**31:
            assert_bits(plan.apply().target["x"], np.int32(value))
        else:
            with pytest.raises(errors.LeafError, match="`params/x`: a value does not fit"):
                plan.apply()
