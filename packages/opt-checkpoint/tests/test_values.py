"""Rules that change values, beside the same done by hand on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from checkpoint_testing import bits
from opt_checkpoint import (
    Map,
    Pad,
    Plan,
    Rename,
    Rule,
    Stack,
    Unstack,
    errors,
    named_state,
    plan_restore,
)
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

contrib: Any = optax.contrib

pytestmark = pytest.mark.usefixtures("optax_promotion")

Arrays = Mapping[str, np.ndarray[Any, Any]]

DEFINITIONS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: opt.adamw(1e-2, weight_decay=0.01, mu_dtype=jnp.bfloat16),
    "sgd_momentum": lambda: opt.sgd(1e-2, momentum=0.9),
    "adafactor": lambda: opt.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
    "sm3": lambda: opt.sm3(1e-2),
}


def random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def trained(name: str, params: Any) -> Optimizer:
    """An optimizer whose state is the work of a step."""
    optimizer: Optimizer = DEFINITIONS[name]().create(params)
    return optimizer.apply_gradient(jax.tree.map(lambda p: random(p.shape, p.size) + p, params))


def leaves(optimizer: Optimizer) -> Arrays:
    return {name: np.asarray(leaf) for name, leaf in named_state(optimizer).items()}


def planned(saved: Optimizer, target: Optimizer, rules: list[Rule], allow: Any = ()) -> Plan[Any]:
    return plan_restore(named_state(saved), target, rules=rules, allow=allow)


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in found if bits(found[name]) != bits(expected[name])]
    assert not wrong


def problems(plan: Plan[Any]) -> dict[str, str]:
    return {row.leaf.name: row.problem for row in plan.rows if row.problem}


def padded(array: np.ndarray[Any, Any], axis: int, to: int) -> np.ndarray[Any, Any]:
    widths = [(0, to - n if i == axis else 0) for i, n in enumerate(array.shape)]
    return np.pad(array, widths)


# Growing: the larger dimension is the vocabulary's before and after; then another one; then the
# same one of two that were alike, so that Optax's rows and columns change places.


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before", "after", "swaps"),
    [
        ((6, 4), (9, 4), False),
        ((4, 12), (10, 12), False),
        ((3, 8, 8), (3, 12, 8), True),
    ],
)
def test_factored_state_grows_or_changes_places(
    before: tuple[int, ...], after: tuple[int, ...], swaps: bool
) -> None:
    axis = len(before) - 2
    saved = trained("adafactor", {"w": random(before)})
    target = DEFINITIONS["adafactor"]().create({"w": jnp.ones(after)})
    plan = planned(saved, target, [("(.*)/w", Pad(axis - len(before), after[axis]))])
    old, new = leaves(saved), leaves(plan.apply())
    fields = ("v_row", "v_col")
    for field, other in zip(fields, fields[::-1], strict=True):
        was = old[f"state/factored_rms/{other if swaps else field}/w"]
        to = new[f"state/factored_rms/{field}/w"]
        at = next(
            (i for i, (n, m) in enumerate(zip(was.shape, to.shape, strict=True)) if n != m), 0
        )
        assert bits(to) == bits(padded(was, at, to.shape[at]))
    assert ("rows and columns change places" in str(plan)) == swaps
    assert_same(
        {k: v for k, v in new.items() if "v_" not in k},
        {
            k: padded(v, axis, after[axis]) if v.shape == before else v
            for k, v in old.items()
            if "v_" not in k
        },
    )


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Pad(0, 7), "dimension 0 of `w` has 6 entries in the target, and a rule pads to 7"),
        (Pad(1, 3), "expected `params/w` of [6, 3], found [4, 3]"),
    ],
)
def test_what_cannot_be_padded_is_told(rule: Pad, told: str) -> None:
    saved = trained("adamw", {"w": random((4, 3))})
    target = DEFINITIONS["adamw"]().create({"w": jnp.zeros((6, 3))})
    with pytest.raises(errors.PlanError) as caught:
        planned(saved, target, [(".*/w", rule)]).apply()
    assert told in str(caught.value)
    assert "state/adam/mu/w" in str(caught.value)


@pytest.mark.slow
def test_a_moment_of_a_padded_parameter_is_not_kept_by_its_size() -> None:
    """The rows of a square matrix are no longer the rows when it grows, though they fit."""
    saved = trained("adafactor", {"w": random((8, 8))})
    target = DEFINITIONS["adafactor"]().create({"w": jnp.ones((12, 8))})
    rules: list[Rule] = [("params/w", Pad(0, 12)), ("state/.*/(v|v_col|ema)/w", Pad(0, 12))]
    plan = planned(saved, target, rules)
    (row,) = [row for row in plan.rows if row.leaf.name == "state/factored_rms/v_row/w"]
    assert (row.action, row.is_ok, row.leaf.shape) == ("initialised", False, (8,))
    assert plan.missing_words == {"initialise", "drop"}
    assert "rows and columns change places" in row.note


def test_codes_are_not_padded() -> None:
    """What stands for a float in eight bits has no entry that is known to mean 0."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int8), params)

    coded = OptaxWrapper(optax.GradientTransformation(init, lambda u, s, p=None: (u, s)))
    saved, target = (coded.create({"w": random((n, 2))}) for n in (2, 4))
    wrong = problems(planned(saved, target, [(".*/w", Pad(0, 4))]))
    assert list(wrong.values()) == [
        "int8 for a parameter of float32 is a code, not a value to pad with"
    ]


# Functions

QKV = (r"\1/q/\2", r"\1/k/\2", r"\1/v/\2")
FUSE: list[Rule] = [("(.*)/qkv/(.*)", Map(QKV, lambda *given: jnp.concatenate(given, -1)))]


def attention() -> dict[str, Any]:
    return {n: {"kernel": random((4, 3), i), "bias": random((3,), i)} for i, n in enumerate("qkv")}


def fused() -> dict[str, Any]:
    return {"qkv": {"kernel": jnp.ones((4, 9)), "bias": jnp.ones(9)}}


def test_projections_are_fused_and_split_with_their_moments() -> None:
    saved = trained("adamw", {"a": attention()})
    plan = planned(saved, DEFINITIONS["adamw"]().create({"a": fused()}), FUSE)
    old = leaves(saved)
    expected = {}
    for leaf, value in old.items():
        if "/k/" in leaf or "/v/" in leaf:
            continue
        parts = [old[leaf.replace("/q/", f"/{n}/")] for n in "qkv"]
        is_fused = "/q/" in leaf
        expected[leaf.replace("/q/", "/qkv/")] = np.concatenate(parts, -1) if is_fused else value
    together = plan.apply()
    assert_same(leaves(together), expected)

    split: list[Rule] = [
        (f"(.*)/{n}/(.*)", Map(r"\1/qkv/\2", lambda x, i=i: jnp.split(x, 3, -1)[i]))
        for i, n in enumerate("qkv")
    ]
    assert_same(leaves(planned(together, saved, split).apply()), old)


def test_a_parameter_is_mapped_with_its_moments_or_not_at_all() -> None:
    """A square kernel is transposed: its moments would fit as they are."""
    saved = trained("adamw", {"w": random((4, 4))})
    rules: list[Rule] = [("params/w", Map("params/w", jnp.transpose))]
    plan = planned(saved, saved, rules)
    left = [row.leaf.name for row in plan.rows if not row.is_ok]
    assert left == ["state/adam/mu/w", "state/adam/nu/w"] * 2  # to begin anew, and to be dropped
    assert plan.missing_words == {"initialise", "drop"}
    assert "a `Map` makes `params/w`, and no rule says what this becomes" in str(plan)
    assert not planned(saved, saved, rules, {"initialise"}).is_ok
    anew = leaves(planned(saved, saved, rules, {"initialise", "drop"}).apply())
    assert not anew["state/adam/mu/w"].any()
    assert int(anew["state/adam/count"]) == 1

    everything = planned(saved, saved, [("(.*)/w", Map(r"\1/w", jnp.transpose))]).apply()
    expected = {n: v.T if n.endswith("w") else v for n, v in leaves(saved).items()}
    assert_same(leaves(everything), expected)


def test_a_function_is_checked_before_it_is_applied() -> None:
    saved = trained("sgd_momentum", {"w": random((2, 3))})
    target = DEFINITIONS["sgd_momentum"]().create({"w": jnp.zeros((3, 2))})

    def by(fn: Any) -> Plan[Any]:
        return planned(saved, target, [("(.*)/w", Map(r"\1/w", fn))])

    wrong: list[tuple[Any, str]] = [
        (lambda x: x, "is [2, 3], expected [3, 2]"),
        (lambda x: (x.T,), "returns tuple, not one array"),
        (lambda x: jnp.concatenate([x, x.T]), "raises TypeError"),
        (lambda x: np.asarray(x).T, "of float32[2, 3] needs values: write it with `jax.numpy`"),
    ]
    for fn, told in wrong:
        assert problems(by(fn)).keys() == {"params/w", "state/trace/trace/w"}
        assert all(told in why for why in problems(by(fn)).values())


# Layers

UNSTACK: list[Rule] = [(r"(.*)/layers_(\d+)/(.*)", Unstack(r"\1/layers/\3", r"\2"))]


def test_slices_that_nothing_takes_are_dropped() -> None:
    saved = named_state(trained("adamw", {"layers": {"k": random((4, 2, 3))}}))
    target = trained("adamw", {f"layers_{i}": {"k": random((2, 3))} for i in (0, 1, 3)})
    plan = plan_restore(saved, target, rules=UNSTACK)
    names = [f"{name}/layers/k[2]" for name in ("params", "state/adam/mu", "state/adam/nu")]
    assert [*plan.dropped] == names
    assert not plan.is_ok
    assert plan.missing_words == {"drop"}
    for allow, rules in (({"drop"}, UNSTACK), ((), [*UNSTACK, (".*/layers/k", "drop")])):
        restored = plan_restore(saved, target, allow=allow, rules=rules).apply()
        assert np.array_equal(restored.target["layers_3"]["k"], saved.leaves["params/layers/k"][3])
    along: list[Rule] = [("params/b", Unstack("params/w", "1", axis=1))]
    plan = plan_restore(
        named_state(created(w=jnp.ones((2, 3)))), created(b=jnp.ones(2)), rules=along
    )
    assert plan.dropped == ("params/w[:, 0]", "params/w[:, 2]")


def layers() -> dict[str, Any]:
    return {f"layers_{i}": {"w": random((6, 4), i), "b": random((4,), 20 + i)} for i in range(3)}


def stacked(axis: int = 0) -> dict[str, Any]:
    together = lambda *parts: jnp.ones_like(jnp.stack(parts, axis))  # noqa: E731
    return {"layers": jax.tree.map(together, *layers().values())}


def stack(axis: int = 0) -> list[Rule]:
    return [(r"(.*)/layers/(.*)", Stack(r"\1/layers_{i}/\2", axis))]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "axis"), [("adamw", 0), ("adamw", 1), ("adafactor", 1)])
def test_layers_are_stacked_and_unstacked(name: str, axis: int) -> None:
    saved = trained(name, layers())
    plan = planned(saved, DEFINITIONS[name]().create(stacked(axis)), stack(axis))
    assert " <- params/layers_0/w .. params/layers_2/w (3)" in str(plan)
    together = plan.apply()
    old, new = leaves(saved), leaves(together)
    for leaf in new:
        if "/layers/" not in leaf:
            assert bits(new[leaf]) == bits(old[leaf])
            continue
        parts = [old[leaf.replace("layers", f"layers_{i}")] for i in range(3)]
        at = 0 if "v_row" in leaf else axis  # of the dimensions that it keeps
        expected = parts[0] if new[leaf].shape == (1,) else np.stack(parts, at)
        assert bits(new[leaf]) == bits(expected)

    apart: list[Rule] = [(r"(.*)/layers_(\d+)/(.*)", Unstack(r"\1/layers/\3", r"\2", axis))]
    assert_same(leaves(planned(together, saved, apart).apply()), old)


@pytest.mark.slow
def test_accumulators_of_sm3_are_refused() -> None:
    """They cover all layers together."""
    wrong = problems(
        planned(trained("sm3", layers()), DEFINITIONS["sm3"]().create(stacked()), stack())
    )
    assert wrong
    assert all("/mu/" in name for name in wrong)


# The words of rules


def created(**arrays: Any) -> Optimizer:
    made: Optimizer = opt.sgd(0.1).create(arrays)
    return made


def restored(saved: Optimizer, target: Optimizer, rules: Any, allow: Any = ()) -> dict[str, Any]:
    result = plan_restore(named_state(saved), target, rules=rules, allow=allow).apply()
    return {name: leaf.tolist() for name, leaf in result.target.items()}


def test_the_first_rule_that_matches_decides() -> None:
    saved, target = (
        created(a=jnp.ones(1), b=jnp.zeros(1)),
        created(a=jnp.full(1, 5.0), b=jnp.ones(1)),
    )
    rules = [("params/a", "keep"), ("params/.*", "initialise")]
    assert restored(saved, target, rules) == {"a": [5.0], "b": [1.0]}
    assert restored(saved, target, rules[::-1])["a"] == [5.0]
    renamed = [("params/a", Rename("params/b")), rules[1]]
    assert restored(saved, target, renamed, {"drop"}) == {"a": [0.0], "b": [1.0]}


WRONG: list[tuple[Any, list[Any], type[Exception], str]] = [
    ("initialise", [], TypeError, "`allow` must be a set of words; .* give `{'initialise'}`"),
    ((), [("params/a", "forget")], ValueError, "`rules`: expected one of .*; found 'forget'"),
    ((), [("params/(", "drop")], ValueError, "'params/\\(' is not a regular expression"),
    ((), [("params/a", Stack("params/b"))], ValueError, "source of a `Stack` must have"),
    ((), [("params/a", Map((), jnp.add))], TypeError, "must be a name or a tuple of names"),
    ((), [("params/a", Map("a", "b"))], TypeError, "the `fn` of a `Map` must be a function"),  # type: ignore[arg-type]
    ((), [("params/a", Pad(0.5, 3))], TypeError, "`axis` of a `Pad` must be an integer"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("allow", "rules", "error", "told"), WRONG)
def test_what_is_no_policy_is_refused(allow: Any, rules: Any, error: Any, told: str) -> None:
    saved = created(a=jnp.ones(1))
    with pytest.raises(error, match=told):
        plan_restore(named_state(saved), saved, allow=allow, rules=rules)


# A vocabulary that grows: its new rows have the state that `init` makes for them

OLD, NEW, WIDTH = 3, 5, 4

# Everything here treats the rows of a matrix apart, but for its counts.
ROWS: dict[str, Any] = {
    "rprop": optax.rprop(0.1),
    "rmsprop centered": optax.rmsprop(0.1, initial_scale=2.0, centered=True, momentum=0.9),
    "several": optax.chain(optax.scale_by_rss(2.0), optax.masked(optax.trace(0.9), {"w": True})),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ROWS)
def test_old_rows_stay_and_new_rows_are_those_of_a_new_run(name: str) -> None:
    definition = OptaxWrapper(ROWS[name])

    def created(rows: int, value: float) -> Optimizer:
        return definition.create({"w": jnp.full((rows, WIDTH), value)})

    saved = created(OLD, 1.0)
    for step in range(4):
        saved = saved.apply_gradient({"w": random((OLD, WIDTH), step)})
    plan = planned(saved, created(NEW, 7.0), [(".*/w", Pad(0, NEW, 0.25))])
    assert "params/w: 3 -> 5 along 0 with 0.25" in str(plan)
    before, after, fresh = map(leaves, (saved, plan.apply(), created(NEW, 0.25)))
    for leaf, found in after.items():
        if found.shape == (NEW, WIDTH):
            np.testing.assert_array_equal(found[:OLD], before[leaf], err_msg=leaf)
            np.testing.assert_array_equal(found[OLD:], fresh[leaf][OLD:], err_msg=leaf)
        else:
            np.testing.assert_array_equal(found, before[leaf], err_msg=leaf)


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [contrib.schedule_free_adamw, contrib.dog, optax.lbfgs])
def test_a_copy_of_a_parameter_grows_as_that_does(make: Any) -> None:
    tx = make(0.1)
    saved = OptaxWrapper(tx).create({"w": jnp.ones((OLD, 2)), "b": jnp.ones(2)})
    target = OptaxWrapper(tx).create({"w": jnp.full((NEW, 2), 7.0), "b": jnp.ones(2)})
    plan = plan_restore(named_state(saved), target, rules=[(".*/w", Pad(0, NEW, 0.25))])
    found = plan.apply()
    copies = {"z", "init_params", "params"} & {f for r in plan.rows for f in r.leaf.field}
    assert copies
    for name, leaf in named_state(found).items():
        if copies & {*name.split("/")[:-1]} and name.endswith("/w"):
            assert np.all(np.asarray(leaf)[OLD:] == 0.25), name
    assert "along 0 as its parameter" in str(plan)
