"""Explanations: what is found of each dimension, how, and what is said where nothing decides."""

import gc
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from opt_partition import derive_logical_axes, explain
from opt_partition.errors import UndecidedError


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


PARAMS = {"w": shape(256, 384), "b": shape(384)}
AXES = {"w": P("embed", "mlp"), "b": P("mlp")}
AXES_OF_W = {"w": P("embed", "mlp")}
Sizes = tuple[int, ...]


def each(make: Callable[[Sizes], Sizes]) -> Callable[[Any], Any]:
    """An `init` that makes, of nothing but its shape, one leaf of each parameter."""
    return lambda params: jax.tree.map(lambda p: jnp.zeros(make(p.shape)), params)


def row_of(init: Any, sizes: Sizes, **options: Any) -> Any:
    [row] = explain(init, {"w": shape(*sizes)}, {"w": ("a", "b")}, **options).rows
    return row


def test_a_row_says_everything() -> None:
    rows = {row.path: row for row in explain(optax.adafactor(0.1), PARAMS, AXES).rows}
    row = rows["0/v_row/w"]
    assert (row.shape, row.dtype, row.bytes) == ((256,), jnp.float32, 1024)
    assert row.parameter == "w"
    assert (row.dims, row.axes, row.dropped, row.spec) == ((0,), ("embed",), ("mlp",), P("embed"))
    assert (row.source, row.sources, row.is_disputed) == ("symbols", ("symbols",), False)
    assert (rows["0/count"].source, rows["0/count"].spec) == ("scalar", P())


def test_the_table_and_json() -> None:
    explanation = explain(optax.trace(0.9), PARAMS, AXES)
    assert str(explanation).splitlines() == [
        "state    shape       dtype    parameter  axes          source   note",
        "trace/b  (384,)      float32  b          (mlp)         symbols",
        "trace/w  (256, 384)  float32  w          (embed, mlp)  symbols",
        "2 leaves, 394,752 bytes; `init` evaluated 2 times",
    ]
    data = json.loads(explanation.to_json())
    assert data["evaluations"] == 2
    row = data["rows"][1]
    assert row["axes"] == ["embed", "mlp"]
    assert (row["dtype"], row["bytes"], row["dims"]) == ("float32", 4 * 256 * 384, [0, 1])


@pytest.mark.parametrize(
    ("make", "sizes", "axes", "note"),
    [
        (lambda s: (s[0] * s[1],), (4, 7), (None,), "computed from parameter dimension 0, 1"),
        (lambda s: (3 * s[0],), (4, 7), (None,), "computed from parameter dimension 0"),
        (lambda s: (s[0] + 1,), (8, 6), (None,), "computed from parameter dimension 0"),
        (lambda s: (max(s),), (7, 8), ("b",), ""),
        # On a tie, `init` takes the first.
        (lambda s: (max(s),), (8, 8), ("a",), ""),
    ],
)
def test_what_is_computed_from_sizes(
    make: Callable[[Sizes], Sizes], sizes: Sizes, axes: Any, note: str
) -> None:
    row = row_of(each(make), sizes, strict=True)
    assert (row.axes, row.note) == (axes, note)


EQUAL = "`init` creates another shape if sizes are symbols, which are never equal"


@pytest.mark.parametrize(
    ("make", "sizes", "axes", "note"),
    [
        # The scales of quantised moments; the last block may be a part of one.
        (lambda s: (-(-s[0] // 4),), (9, 7), (None,), "counts blocks of parameter dimension 0"),
        (lambda s: (2,) if s[0] == s[1] else s[:1], (8, 8), (None,), EQUAL),
    ],
)
def test_what_nothing_decides_is_not_guessed(
    make: Callable[[Sizes], Sizes], sizes: Sizes, axes: Any, note: str
) -> None:
    row = row_of(each(make), sizes)
    assert (row.axes, row.note) == (axes, note)
    assert "fallback" in row.sources
    with pytest.raises(UndecidedError, match=note):
        row_of(each(make), sizes, strict=True)


def test_strict_lists_what_nothing_decided() -> None:
    params = {"square": shape(8, 8), "oblong": shape(8, 6), "cube": shape(4, 4, 4)}
    axes = {"square": ("a", "b"), "oblong": ("a", "b"), "cube": ("a", "b", "c")}
    init = each(lambda s: (max(s),) if len({*s}) == len(s) else (2,))
    found = derive_logical_axes(init, params, axes)
    assert found == {"square": P(), "oblong": P("a"), "cube": P()}
    with pytest.raises(UndecidedError) as caught:
        derive_logical_axes(init, params, axes, strict=True)
    assert str(caught.value).splitlines() == [
        "the axes of these state leaves could not be determined:",
        f"  cube (2,): {EQUAL}; parameter cube of shape (4, 4, 4) has axes ('a', 'b', 'c')",
        f"  square (2,): {EQUAL}; parameter square of shape (8, 8) has axes ('a', 'b')",
        "Pass a rule for their type: `rules={MyState: rule}`.",
    ]


def test_what_needs_numbers_is_left_to_provenance() -> None:
    """Values computed from parameters have names; arrays made of their sizes alone have none."""

    def init(params: Any) -> Any:
        def leaf(p: Any) -> Any:
            return {"mu": jnp.zeros_like(p), "rows": jnp.zeros(int(p.shape[0])), "one": jnp.ones(1)}

        return jax.tree.map(leaf, params)

    explanation = explain(init, {"w": shape(8, 8)}, {"w": ("a", "b")})
    rows = {row.path: (row.axes, row.source) for row in explanation.rows}
    assert rows == {
        "w/mu": (("a", "b"), "provenance"),
        "w/rows": ((None,), "fallback"),
        "w/one": ((None,), "provenance"),
    }
    [note] = explanation.notes
    assert note.startswith("no symbols: `init` cannot be evaluated on symbols (")
    assert note in str(explanation)
    with use_abstract_mesh(AbstractMesh((8,), ("x",), (AxisType.Explicit,))):  # another size
        assert str(explain(init, {"w": shape(8, 8)}, {"w": ("a", "b")})) == str(explanation)
    with pytest.raises(UndecidedError, match=r"w/rows \(8,\): `init` cannot be evaluated"):
        explain(init, {"w": shape(8, 8)}, {"w": ("a", "b")}, strict=True)


def test_what_neither_evaluates_is_undecided() -> None:
    def init(params: Any) -> Any:
        assert {p.shape for p in jax.tree.leaves(params)} <= {(8, 6)}, "no symbols"
        flat = jnp.concatenate([p.ravel() for p in jax.tree.leaves(params)])
        return {"flat": flat, "w": jnp.zeros((2, 8, 6))}

    explanation = explain(init, {"w": shape(8, 6), "v": shape(8, 6)}, {"w": ("a", "b"), "v": None})
    assert [row.source for row in explanation.rows] == ["fallback", "fallback"]
    assert [note[:16] for note in explanation.notes] == ["no symbols: `ini", "no provenance: `"]


def test_a_size_that_is_capped_has_no_name() -> None:
    """A projection whose rank is capped has, but does not index, the size of a dimension."""
    for rank in (64, 100):
        init = each(lambda s: (s[0], min(*s, rank)))  # noqa: B023
        row = row_of(init, (1024, 64), strict=True)
        assert row.axes == ("a", None)
        assert row.note == f"dimension 1: parameter dimension 1 capped at {rank}"


def test_an_init_that_takes_no_large_sizes() -> None:
    """Then names are confirmed at other multiples of the sizes."""

    def init(params: Any) -> Any:
        p = params["w"]
        assert max(p.shape) < 300
        return {"rows": jnp.zeros(p.shape[0]), "rank": jnp.zeros(min(128, p.shape[1]))}

    rows = {row.path: row.axes for row in explain(init, {"w": shape(96, 128)}, AXES_OF_W).rows}
    assert rows == {"rows": ("embed",), "rank": (None,)}


class Own(NamedTuple):
    moments: Any


def test_disagreement_is_a_note_and_under_strict_an_error() -> None:
    def init(params: Any) -> Own:
        return Own(jax.tree.map(jnp.zeros_like, params))

    rules = {Own: lambda leaf: (1, 0)}
    row = row_of(init, (5, 5), rules=rules)
    assert row.axes == ("b", "a")
    assert row.is_disputed
    assert row.note == (
        "dimension 0: rule says 1, symbols say 0; dimension 1: rule says 0, symbols say 1"
    )
    with pytest.raises(UndecidedError, match="rule says 1, symbols say 0"):
        row_of(init, (5, 5), rules=rules, strict=True)


def test_what_init_cannot_do_is_said() -> None:
    with pytest.raises(TypeError) as caught:
        explain(optax.adam, PARAMS, AXES)
    assert "not a constructor that has not been called" in caught.value.__notes__[-1]
    with pytest.raises(TypeError, match=r"rules by type must be a dict .* {'embed': 'data'}"):
        explain(optax.adam(0.1), PARAMS, AXES, rules={"embed": "data"})  # type: ignore[dict-item]


def test_the_garbage_collector_is_left_as_it_was() -> None:
    def init(params: Any) -> Any:
        assert not gc.isenabled()
        raise KeyError("no such parameter")

    with pytest.raises(KeyError, match="no such parameter"):
        explain(init, PARAMS, AXES)
    assert gc.isenabled()


def test_nothing_is_computed_and_no_array_is_made() -> None:
    arrays = {"w": jnp.ones((256, 384)), "b": jnp.ones(384)}
    live = len(jax.live_arrays())
    explanation = explain(optax.adafactor(0.1), arrays, AXES)
    assert len(jax.live_arrays()) == live
    assert {*map(type, jax.tree.leaves(explanation.state))} == {jax.ShapeDtypeStruct}


@pytest.mark.parametrize(
    ("tx", "number"),
    [
        (optax.adamw(0.1), 2),
        (optax.adafactor(0.1), 2),  # it compares sizes with each other, and with less
        (optax.adafactor(0.1, min_dim_size_to_factor=300), 4),
    ],
)
def test_repeated_layers_cost_no_more_evaluations(tx: Any, number: int) -> None:
    def evaluations(layers: int) -> int:
        params = {f"layer_{i}": PARAMS for i in range(layers)}
        return explain(tx, params, {f"layer_{i}": AXES for i in range(layers)}).evaluations

    assert evaluations(1) == evaluations(5) == number
