"""Which leaves hold matrices: every leaf is decided, by one rule."""

import dataclasses
from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import PartitionSpec as P
from opt_matrix import DEFAULT_RULES, Dims, Matrices
from opt_matrix.errors import OptionError, UndecidedError


class MuonDimensionNumbers(NamedTuple):
    """Optax's, which it has since its 0.2.6."""

    reduction_axis: Any
    output_axis: Any


def leaf(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def by_axes(axes: tuple[Any, ...], shape: tuple[int, ...], **options: Any) -> Dims | None:
    return Matrices.by_logical_axes({"w": P(*axes)}, **options).resolve({"w": leaf(*shape)})["w"]


def test_rank_two() -> None:
    found = Matrices.by_rank2().resolve({"a": [leaf(2, 3), leaf(4)], "b": leaf()})
    assert found == {"a/0": Dims((0,), (1,)), "a/1": None, "b": None}
    with pytest.raises(UndecidedError, match=r"mlp/wi: \(2, 3, 4\) is decided by no rule"):
        Matrices.by_rank2().resolve({"mlp": {"wi": leaf(2, 3, 4)}})


def test_paths() -> None:
    matrices = Matrices.by_path(
        {
            "q": ((0,), (1, 2)),
            "per_head": MuonDimensionNumbers(0, 2),
            "qkv": Dims((0,), (-1,), split=(4, 2, 2)),
            "stack": (-2, -1),
            "b.*": None,
        }
    )
    tree = {"q": leaf(6, 2, 3), "per_head": leaf(6, 2, 3), "qkv": leaf(6, 8)}
    found = matrices.resolve({**tree, "stack": leaf(5, 6, 7), "bias": leaf(3)})
    assert found == {
        "bias": None,
        "per_head": Dims((0,), (2,)),
        "q": Dims((0,), (1, 2)),
        "qkv": Dims((0,), (1,), (4, 2, 2)),
        "stack": Dims((1,), (2,)),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Variable:
    """Has the key that variables and boxes of Flax have."""

    value: Any


def test_one_pattern_for_variables_and_arrays() -> None:
    matrices = Matrices.by_path({".*/kernel": (0, 1), ".*/bias": None})
    plain = {"mlp": {"kernel": leaf(2, 3), "bias": leaf(3)}}
    boxed = jax.tree.map(Variable, plain)
    found = matrices.resolve(boxed)
    assert found == {"mlp/bias": None, "mlp/kernel": Dims((0,), (1,))}
    axes = {"mlp": {"kernel": P("embed", "mlp"), "bias": P("mlp")}}
    assert Matrices.by_logical_axes(axes).resolve(boxed) == found


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"w": (0, 1)}, r"x: \(3,\) is decided by no rule"),
        ({"w": (0, 1), ".*": None}, r"w: matched by \['w', '\.\*'\]"),
        ({"w": (0, 1), "x": None, "y": None}, "'y' matches no leaf"),
    ],
)
def test_paths_are_exact(patterns: dict[str, Any], message: str) -> None:
    with pytest.raises(UndecidedError, match=message):
        Matrices.by_path(patterns).resolve({"w": leaf(2, 3), "x": leaf(3)})


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((0, 2), "are not dimensions of"),
        ((0, -2), "more than once"),
        (Dims((0,), (1,), (1, 1)), "add up to the output dimensions' 3"),
        ("rows", "dimensions must be"),
    ],
)
def test_dimensions_must_fit(dims: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Matrices.by_path({"w": dims}).resolve({"w": leaf(2, 3)})


@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 0)])
def test_empty_matrices_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match=r"w: matrices of .* are empty; make the leaf rest"):
        Matrices.by_path({"w": (-2, -1)}).resolve({"w": leaf(*shape)})
    assert Matrices.by_path({"w": (-2, -1)}).resolve({"w": leaf(0, 2, 3)})["w"]


@pytest.mark.parametrize(
    ("axes", "shape", "dims"),
    [
        (("embed", "mlp"), (2, 3), Dims((0,), (1,))),
        (("layers", "embed", "mlp"), (4, 2, 3), Dims((1,), (2,))),
        (("embed", "heads", "kv"), (2, 3, 4), Dims((0,), (1, 2))),
        (("heads", "head_dim", "embed"), (3, 4, 2), Dims((0, 1), (2,))),
        (("layers", "embed"), (4, 2), None),
        (("vocab", "embed"), (9, 2), None),
    ],
)
def test_logical_axes(axes: tuple[str, ...], shape: tuple[int, ...], dims: Dims | None) -> None:
    assert by_axes(axes, shape) == dims
    per_head = {**DEFAULT_RULES, "heads": "batch"}
    assert by_axes(("embed", "heads", "kv"), (2, 3, 4), rules=per_head) == Dims((0,), (2,))


def test_matrices_side_by_side() -> None:
    found = by_axes(("layers", "embed", "joined"), (2, 6, 8), split={"joined": (4, 2, 2)})
    assert found == Dims((1,), (2,), (4, 2, 2))
    with pytest.raises(UndecidedError, match="must be along the output by itself"):
        by_axes(("joined", "embed"), (8, 6), split={"joined": (4, 2, 2)})


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        (("embed", "unknown"), (2, 3)),
        (("embed", None), (2, 3)),
        (("embed", "mlp", "embed"), (2, 3, 2)),
    ],
)
def test_names_that_decide_nothing_are_errors(axes: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UndecidedError, match=r"w: .* is decided by no rule"):
        by_axes(axes, shape)


def test_boxes_and_tuples_of_names() -> None:
    class Box:
        names = ("embed", "mlp")

    axes = {"a": Box(), "b": ("embed", "mlp")}
    found = Matrices.by_logical_axes(axes).resolve({"a": leaf(2, 3), "b": leaf(2, 3)})
    assert set(found.values()) == {Dims((0,), (1,))}
    with pytest.raises(UndecidedError, match="c: "):
        Matrices.by_logical_axes(axes).resolve({"c": leaf(2, 3)})
    with pytest.raises(OptionError, match="more names than"):
        Matrices.by_logical_axes(axes).resolve({"b": leaf(2)})
