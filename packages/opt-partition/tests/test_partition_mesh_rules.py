import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec
from opt_partition import logical_to_mesh
from opt_partition.errors import AxesError, IndivisibleError

P = PartitionSpec
MESH = AbstractMesh((4, 2, 3), ("data", "model", "fsdp"))


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def place(spec: Any, rules: Any, shape: tuple[int, ...], **options: Any) -> tuple[Any, Any]:
    """Spec and notes of one leaf, which is the whole tree."""
    [row] = logical_to_mesh(spec, rules, options.pop("mesh", MESH), leaf(*shape), **options).rows
    return tuple(row.spec), row.notes


@pytest.mark.parametrize(
    ("spec", "rules", "shape", "expected"),
    [
        # The order of the rules decides, not that of the dimensions.
        (P("a", "b"), [("b", "data"), ("a", "data"), ("a", "model")], (8, 8), ("model", "data")),
        # A name may have fallbacks; the first that divides is taken.
        (P("a"), [("a", "data"), ("a", "model")], (6,), ("model",)),
        # `None` decides: the later rule of the name is not reached.
        (P("a"), [("a", None), ("a", "data")], (8,), (None,)),
        # Several axes are used whole or not at all.
        (P("a"), [("a", ["model", "data"])], (8,), (("model", "data"),)),
        (P("a", "b"), [("a", "data"), ("b", ("data", "model"))], (8, 8), ("data", None)),
        # Twice one name: the first dimension that divides gets the first rule.
        (P("a", "a"), [("a", "data"), ("a", "model")], (6, 8), ("model", "data")),
        # Merged dimensions: each name brings its axes, in the order of the names.
        (P(("a", "b")), [("b", "data"), ("a", "model")], (8,), (("model", "data"),)),
        (P(("a", "b")), [("b", "data"), ("a", "model")], (4,), ("data",)),
        # Short specs and `None` leave dimensions whole.
        (P("a"), [("a", "data")], (8, 8, 8), ("data", None, None)),
        (None, [("a", "data")], (8, 8), (None, None)),
        # Nothing divides by everything.
        (P("a"), [("a", "data")], (0,), ("data",)),
    ],
)
def test_rules_are_read_as_flax_reads_them(
    spec: Any, rules: Any, shape: tuple[int, ...], expected: tuple[Any, ...]
) -> None:
    assert place(spec, rules, shape)[0] == expected


@pytest.mark.parametrize(
    ("spec", "rules", "shape", "note"),
    [
        (P(None, "mlp"), {"mlp": "data"}, (3, 7), "1 ('mlp', 7) is not divisible by data=4"),
        (
            P(("a", "b")),
            [("a", "data"), ("b", "model")],
            (4,),
            "0 ('b', 4) is not divisible by data=4, model=2",
        ),
        # A rule with `None` settles it, and the note stays.
        (P("a"), [("a", "data"), ("a", None)], (6,), "0 ('a', 6) is not divisible by data=4"),
        # A fallback is as good; nobody asked for more.
        (P("a"), [("a", "data"), ("a", "model")], (6,), None),
    ],
)
def test_what_stays_whole_is_noted(
    spec: Any, rules: Any, shape: tuple[int, ...], note: str | None
) -> None:
    assert place(spec, rules, shape)[1] == ((f"dimension {note}",) if note else ())


@pytest.mark.parametrize(
    ("memory_kinds", "expected"),
    [
        ("pinned_host", ["pinned_host"] * 3),
        (
            lambda path, x: "pinned_host" if x.ndim == 2 and "mu" in path else None,
            [None, "pinned_host", None],
        ),
    ],
)
def test_memory_kinds_travel(memory_kinds: Any, expected: list[str | None]) -> None:
    shapes = {"mu": {"w": leaf(8, 8), "b": leaf(8)}, "nu": leaf(8, 8)}
    axes = jax.tree.map(lambda _: P("a"), shapes)
    layout = logical_to_mesh(axes, {"a": "data"}, MESH, shapes, memory_kinds=memory_kinds)
    assert [row.memory_kind for row in layout.rows] == expected
    assert [s.memory_kind for s in jax.tree.leaves(layout.shardings)] == expected


SHAPES = {"w": leaf(7, 6), "b": leaf(6)}
FITTING = {"w": P("a", "b"), "b": P("b")}
NONE = {"a": None, "b": None}


@pytest.mark.parametrize(
    ("axes", "rules", "options", "words"),
    [
        (
            {"w": "ab", "b": P("a", "b")},
            NONE,
            {},
            r"b: expected at most 1 axes, .* found \('a', 'b'\)\n  w: axes must be a PartitionSpec",
        ),
        (FITTING, {"a": None}, {}, r"'b', of b, w: no rule\n  Add `\(name, None\)` to `rules` or"),
        (
            FITTING,
            {"a": "tensor", "b": None},
            {},
            r"map 'a' to must be distinct .* has data=4, model=2, fsdp=3; found \('tensor',\)",
        ),
        (FITTING, [("a", 3)], {}, r"`rules` must be pairs of .* None; found \('a', 3\)"),
    ],
)
def test_errors_say_where_and_what_to_do(
    axes: Any, rules: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(AxesError, match=words):
        logical_to_mesh(axes, rules, MESH, SHAPES, **options)


def test_indivisible_dimensions_may_be_errors() -> None:
    rules = [("a", "data"), ("b", "model"), ("c", "data"), ("c", None)]
    axes = {"w": P("a", "b"), "b": P("b"), "settled": P("c"), "taken": P("a", "c")}
    shapes = {"w": leaf(6, 7), "b": leaf(8), "settled": leaf(3), "taken": leaf(8, 8)}
    words = (
        r"w: dimension 0 \('a', 6\) is not divisible by data=4\n  w: dimension 1 \('b', 7\) is not "
        r"divisible by model=2\n  Add another rule"
    )
    with pytest.raises(IndivisibleError, match=words):
        logical_to_mesh(axes, rules, MESH, shapes, on_indivisible="error")


NAMES = st.sampled_from("abcd")
AXES = st.lists(st.sampled_from(MESH.axis_names), max_size=3, unique=True).map(tuple)
ENTRIES = st.none() | NAMES | st.tuples(NAMES, NAMES)


@given(
    entries=st.lists(st.tuples(ENTRIES, st.integers(0, 24)), max_size=4),
    rules=st.lists(st.tuples(NAMES, st.none() | AXES), max_size=6),
)
@settings(deadline=None)
def test_layouts_are_valid_and_as_sharded_as_the_rules_allow(
    entries: list[tuple[Any, int]], rules: list[Any]
) -> None:
    names, shape = [name for name, _ in entries], tuple(size for _, size in entries)
    layout = logical_to_mesh(P(*names), rules, MESH, leaf(*shape), on_unknown="replicate")
    [row] = layout.rows
    assert layout.shardings.shard_shape(shape) == row.shard_shape  # raises if it does not divide
    assert layout.shapes.sharding == layout.shardings
    used = [() if e is None else (e,) if isinstance(e, str) else e for e in row.spec]
    taken = set(itertools.chain(*used))
    for name, size, have in zip(names, shape, used, strict=True):
        if not isinstance(name, str):
            continue
        table = [tuple(axes or ()) for rule, axes in rules if rule == name]
        assert have in (*table, ())
        if not have and () not in table:
            # Nothing was left on the table: no rule could still be used.
            assert not any(
                size % math.prod(MESH.shape[axis] for axis in axes) == 0 and taken.isdisjoint(axes)
                for axes in table
            )
            assert bool(table) <= any(f"({name!r}, {size})" in note for note in row.notes)
