"""Explanations: rows, table, JSON, strictness and cost."""

import gc
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from opt_partition import derive_logical_axes, explain
from opt_partition.errors import UndecidedError


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


PARAMS = {"w": shape(256, 384), "b": shape(384)}
AXES = {"w": P("embed", "mlp"), "b": P("mlp")}


def test_a_row_says_everything() -> None:
    rows = {row.path: row for row in explain(optax.adafactor(0.1), PARAMS, AXES).rows}
    row = rows["0/v_row/w"]
    assert (row.shape, row.dtype, row.bytes) == ((256,), jnp.float32, 1024)
    assert (row.parameter, row.parameter_shape, row.parameter_axes) == (
        "w",
        (256, 384),
        P("embed", "mlp"),
    )
    assert (row.dims, row.axes, row.dropped, row.spec) == ((0,), ("embed",), ("mlp",), P("embed"))
    assert (row.source, row.sources, row.is_disputed) == ("rule", ("rule",), False)
    assert rows["0/count"].source == "scalar"
    assert rows["0/count"].spec == P()
    assert rows["0/v/b"].is_mirror
    assert not row.is_mirror


def test_the_table() -> None:
    assert str(explain(optax.trace(0.9), PARAMS, AXES)).splitlines() == [
        "state    shape       dtype    parameter  axes          source      note",
        "trace/b  (384,)      float32  b          (mlp)         provenance",
        "trace/w  (256, 384)  float32  w          (embed, mlp)  provenance",
        "2 leaves, 394,752 bytes; `init` evaluated 1 times",
    ]


def test_json() -> None:
    data = json.loads(explain(optax.adam(0.1), PARAMS, AXES).to_json())
    assert data["evaluations"] == 1
    row = next(row for row in data["rows"] if row["path"] == "0/mu/w")
    assert row["axes"] == ["embed", "mlp"]
    assert row["parameter_axes"] == ["embed", "mlp"]
    assert (row["dtype"], row["bytes"], row["dims"]) == ("float32", 4 * 256 * 384, [0, 1])


class Largest(NamedTuple):
    """One vector along the larger side: on a tie only the code of `init` knows which."""

    side: Any


def largest(params: Any) -> Largest:
    return Largest(jax.tree.map(lambda p: jnp.zeros(max(p.shape)), params))


def test_strict_lists_what_nothing_decided() -> None:
    params = {"square": shape(8, 8), "oblong": shape(8, 6), "cube": shape(4, 4, 4)}
    axes = {"square": ("a", "b"), "oblong": ("a", "b"), "cube": ("a", "b", "c")}
    found = derive_logical_axes(largest, params, axes)
    assert found.side == {"square": P(), "oblong": P("a"), "cube": P()}
    with pytest.raises(UndecidedError) as caught:
        derive_logical_axes(largest, params, axes, strict=True)
    assert str(caught.value).splitlines() == [
        "the axes of these state leaves could not be determined:",
        "  side/cube (4,): changes of parameter dimension 0 give inconsistent results",
        "  side/square (8,): changes of parameter dimension 0 give inconsistent results",
        "Pass a rule for their type: `rules=DEFAULT_RULES.extend({MyState: rule})`.",
    ]


def test_blocks_are_reported() -> None:
    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros((p.shape[0], -(-p.shape[1] // 128))), params)

    params, axes = {"w": shape(512, 1024)}, {"w": ("a", "b")}
    [row] = explain(init, params, axes).rows
    assert (row.axes, row.source) == (("a", None), "fallback")
    assert row.note == "dimension 1: counts blocks of parameter dimension 1"
    with pytest.raises(UndecidedError, match="counts blocks of parameter dimension 1"):
        explain(init, params, axes, strict=True)


def test_an_alignment_keeps_the_doubt() -> None:
    """Where `init` takes no other sizes only those it has can speak, if there is one way."""

    def init(params: Any) -> Any:
        assert {p.shape for p in jax.tree.leaves(params)} <= {(8, 6), (8, 8)}, "no other"
        return jax.tree.map(lambda p: jnp.zeros((2, *p.shape)), params)

    params = {"w": shape(8, 6), "square": shape(8, 8)}
    rows = {row.path: row for row in explain(init, params, dict.fromkeys(params, ("a", "b"))).rows}
    assert rows["w"].axes == (None, "a", "b")
    assert rows["w"].sources == ("fallback", "alignment", "alignment")
    assert "dimension 1: sizes cannot be changed: AssertionError: no other" in rows["w"].note
    assert rows["square"].axes == (None, None, None)
    assert rows["square"].source == "fallback"


def test_equal_shapes_may_be_treated_unlike_by_name() -> None:
    def init(params: Any) -> Any:
        def row(path: Any, p: Any) -> Any:
            return jnp.zeros(p.shape[1] if path[-1].key == "q" else p.shape[0])

        return {"row": jax.tree_util.tree_map_with_path(row, params)}

    params = {"q": shape(64, 64), "k": shape(64, 64)}
    axes = {"q": ("embed", "heads"), "k": ("embed", "kv")}
    assert derive_logical_axes(init, params, axes, strict=True) == {
        "row": {"q": P("heads"), "k": P("embed")}
    }


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_leaf_in_the_place_of_another_parameter(names: str) -> None:
    def swapped(params: Any) -> Any:
        shapes = [p.shape for p in params.values()]
        return {name: jnp.zeros(s) for name, s in zip(params, reversed(shapes), strict=True)}

    def reverse(params: Any) -> Any:
        return [jnp.zeros(p.shape) for p in reversed(params)]

    params = {name: shape(64, 64) for name in names}
    axes = {name: (f"{name}0", f"{name}1") for name in names}
    expected = [P(f"{name}0", f"{name}1") for name in reversed(names)]
    found = derive_logical_axes(swapped, params, axes, strict=True)
    assert [*found.values()] == expected
    as_list = derive_logical_axes(reverse, [*params.values()], [*axes.values()], strict=True)
    assert as_list == expected


def test_a_stack_of_parameters() -> None:
    def stack(params: Any) -> Any:
        return {"mu": jnp.stack([params["q"], params["k"]])}

    params = {"q": shape(64, 64), "k": shape(64, 64)}
    same, other = ("embed", "heads"), ("embed", "kv")
    axes = derive_logical_axes(stack, params, {"q": same, "k": same}, strict=True)
    assert axes == {"mu": P(None, "embed", "heads")}
    with pytest.raises(UndecidedError, match="the parameter that it follows cannot be identified"):
        derive_logical_axes(stack, params, {"q": same, "k": other}, strict=True)


def test_an_order_that_sizes_decide() -> None:
    def init(params: Any) -> Any:
        leaves = sorted(jax.tree.leaves(params), key=lambda p: -p.size)
        return {"m": tuple(jnp.zeros(p.shape) for p in leaves)}

    params = {"a": shape(8), "b": shape(8, 8), "c": shape(8, 8)}
    axes = {"a": ("x",), "b": ("a", "b"), "c": ("c", "d")}
    with pytest.raises(UndecidedError, match="m/1"):
        derive_logical_axes(init, params, axes, strict=True)


def test_sizes_that_must_divide() -> None:
    def init(params: Any) -> Any:
        assert all(n % 8 == 0 for p in jax.tree.leaves(params) for n in p.shape)
        return jax.tree.map(lambda p: jnp.zeros(p.shape[::-1]), params)

    params, axes = {"w": shape(128, 128)}, {"w": ("e", "m")}
    assert derive_logical_axes(init, params, axes, strict=True) == {"w": P("m", "e")}


def test_what_init_cannot_do_is_said() -> None:
    with pytest.raises(TypeError) as caught:
        explain(optax.adam, PARAMS, AXES)
    assert "not a constructor that has not been called" in caught.value.__notes__[-1]
    with pytest.raises(TypeError, match="`rules` must be `Rules`; got dict"):
        explain(optax.adam(0.1), PARAMS, AXES, rules={})  # type: ignore[arg-type]


def test_disagreement_is_a_note_and_under_strict_an_error() -> None:
    from opt_partition import Rules

    def init(params: Any) -> Largest:
        return Largest(jax.tree.map(jnp.zeros_like, params))

    rules = Rules({Largest: lambda leaf: (1, 0)})
    params, axes = {"w": shape(5, 5)}, {"w": ("a", "b")}
    [row] = explain(init, params, axes, rules=rules).rows
    assert row.axes == ("b", "a")
    assert row.is_disputed
    assert row.note == (
        "dimension 0: rule says 1, provenance says 0; dimension 1: rule says 0, provenance says 1"
    )
    with pytest.raises(UndecidedError, match="rule says 1, provenance says 0"):
        explain(init, params, axes, rules=rules, strict=True)


def test_sizes_that_changes_do_not_bear_out_are_undecided() -> None:
    """A projection whose rank is capped has, but does not index, the size of a dimension."""

    def init(params: Any) -> Any:
        m, n = params["router"].shape
        return {"router": jnp.zeros((m, min(64, m, n)))}

    params, axes = {"router": shape(1024, 64)}, {"router": ("embed", "experts")}
    explanation = explain(init, params, axes)
    [row] = explanation.rows
    assert row.source == "alignment"
    assert row.is_doubted
    assert "changes of parameter dimension 1 give inconsistent results" in row.note
    assert explanation.undecided == [row]
    with pytest.raises(UndecidedError, match=r"router .1024, 64.: .* give inconsistent results"):
        explain(init, params, axes, strict=True)


def test_an_init_that_no_explicit_mesh_takes() -> None:
    explanation = explain(optax.flatten(optax.adam(0.1)), PARAMS, AXES, strict=True)
    [note] = explanation.notes
    assert note.startswith("no provenance: `init` does not work on an Explicit mesh (")
    assert note in str(explanation)
    mu = next(row for row in explanation.rows if row.path == "0/mu")
    assert mu.axes == (None,)
    assert mu.source == "differencing"
    assert mu.note.startswith("computed from the parameter dimensions 0, 1")


def test_halves_of_the_parameters_that_differ_in_names() -> None:
    """Lookahead keeps the state of one half of what it is given; its path does not tell which."""
    tx = optax.lookahead(optax.scale_by_factored_rms(min_dim_size_to_factor=2), 5, 0.5)
    params = optax.LookaheadParams({"w": shape(8, 8)}, {"w": shape(8, 8)})
    axes = optax.LookaheadParams({"w": ("a", "b")}, {"w": ("c", "d")})
    state = derive_logical_axes(tx, params, axes, strict=True).fast_state
    assert (state.v_row["w"], state.v_col["w"]) == (P("a"), P("b"))


def test_halves_of_complex_parameters() -> None:
    tx = optax.contrib.split_real_and_imaginary(  # type: ignore[attr-defined]
        optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    )
    params = {"w": jax.ShapeDtypeStruct((8, 8), "complex64")}
    rows = explain(tx, params, {"w": ("a", "b")}, strict=True).rows
    axes = {row.path.removeprefix("inner_state/"): row.axes for row in rows}
    assert axes["v_row/w/real"] == axes["v_row/w/imaginary"] == ("a",)
    assert axes["v_col/w/real"] == axes["v_col/w/imaginary"] == ("b",)


def test_what_is_a_little_longer_than_a_dimension_does_not_index_it() -> None:
    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape[0] + 1), params)

    [row] = explain(init, {"w": shape(8, 6)}, {"w": ("a", "b")}, strict=True).rows
    assert (row.axes, row.note) == (
        (None,),
        "grows with parameter dimension 0, but is not its size",
    )


def test_what_is_not_a_transformation() -> None:
    with pytest.raises(
        TypeError, match=r"must be an Optax transformation, its `init`, .*; got int"
    ):
        explain(3, PARAMS, AXES)  # type: ignore[arg-type]


def test_errors_of_init_pass_through() -> None:
    def init(params: Any) -> Any:
        raise KeyError("no such parameter")

    with pytest.raises(KeyError, match="no such parameter"):
        explain(init, PARAMS, AXES)


def test_the_garbage_collector_is_left_as_it_was() -> None:
    def init(params: Any) -> Any:
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        explain(init, PARAMS, AXES)
    assert gc.isenabled()
    gc.disable()
    try:
        explain(optax.trace(0.9), PARAMS, AXES)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_computed_and_no_array_is_made() -> None:
    arrays = {"w": jnp.ones((256, 384)), "b": jnp.ones(384)}
    live = len(jax.live_arrays())
    explanation = explain(optax.adafactor(0.1), arrays, AXES)
    assert len(jax.live_arrays()) == live
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(explanation.state)
    )


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sm3", "lbfgs"])
def test_repeated_layers_cost_no_more_evaluations(name: str) -> None:
    tx = {
        "adamw": optax.adamw(0.1),
        "adafactor": optax.adafactor(0.1),
        "sm3": optax.sm3(0.1),
        "lbfgs": optax.scale_by_lbfgs(),
    }[name]

    def evaluations(layers: int) -> int:
        params = {f"layer_{i}": PARAMS for i in range(layers)}
        return explain(tx, params, {f"layer_{i}": AXES for i in range(layers)}).evaluations

    assert evaluations(1) == evaluations(50) <= 12
