import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from opt_partition import extend_over, logical_to_mesh
from opt_partition.errors import AxesError

P = PartitionSpec
MESH = AbstractMesh((4, 2, 3, 1), ("data", "fsdp", "model", "one"))


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("spec", "shape", "axes", "expected"),
    [
        (P(), (4, 8), "data", (None, "data")),  # the longer dimension
        (P(), (8, 8), "data", ("data", None)),  # the earlier of two
        (P("fsdp"), (32, 4), "data", ("fsdp", "data")),  # rather a whole dimension
        (P("fsdp"), (16, 3), "data", (("fsdp", "data"), None)),  # behind what is there
        (P("fsdp"), (4, 3), "data", ("fsdp", None)),  # 4 is not divisible by both
        (P(), (8, 64), ("data", "fsdp"), (None, ("data", "fsdp"))),  # together on one
        (P(), (8, 64), ("fsdp", "data"), (None, ("fsdp", "data"))),  # in the order given
        (P(), (4, 2), ("data", "fsdp"), ("data", "fsdp")),  # or apart
        (P(), (2, 4), ("data", "fsdp", "model"), ("fsdp", "data")),  # or some of them
        (P(), (4,), ("fsdp", "data"), ("data",)),  # the larger saving
        (P(), (), "data", ()),
        (P(), (0, 4), "data", (None, None)),
    ],
)
def test_where_it_goes(
    spec: Any, shape: tuple[int, ...], axes: Any, expected: tuple[Any, ...]
) -> None:
    assert tuple(extend_over(spec, leaf(*shape), MESH, axes).specs) == expected


def test_min_bytes_counts_the_whole_leaf() -> None:
    shapes = {"w": leaf(16, 4), "b": leaf(16)}
    layout = extend_over({"w": P("fsdp"), "b": P()}, shapes, MESH, "data", min_bytes=256)
    assert {row.path: tuple(row.spec) for row in layout.rows} == {
        "b": (None,),
        "w": ("fsdp", "data"),
    }


def test_inside_shard_map_leaves_are_local() -> None:
    types = (AxisType.Manual, AxisType.Explicit)
    mesh = AbstractMesh((4, 2), ("data", "fsdp"), axis_types=types)
    with pytest.raises(AxesError, match="inside shard_map leaves are local"):
        extend_over(P(), leaf(8, 8), mesh, "fsdp")


def test_notes_before_are_kept_once() -> None:
    first = logical_to_mesh(P("a", "b"), {"a": "data", "b": "fsdp"}, MESH, leaf(6, 3))
    second = extend_over(first, leaf(6, 3), MESH, "data")
    assert second.rows[0].notes == (
        "dimension 0 ('a', 6) is not divisible by data=4",
        "dimension 1 ('b', 3) is not divisible by fsdp=2",
        "ZeRO: stays replicated over data=4: no dimension of (6, 3) is divisible",
    )
    assert extend_over(second, leaf(6, 3), MESH, "data").rows == second.rows


def test_arguments_are_checked() -> None:
    with pytest.raises(AxesError, match=r"distinct mesh axes: the mesh has data=4, .*; found 'x'"):
        extend_over(P(), leaf(8), MESH, "x")
    with pytest.raises(ValueError, match="`min_bytes` must be non-negative; got -1"):
        extend_over(P(), leaf(8), MESH, "data", min_bytes=-1)


AXES = st.lists(st.sampled_from(MESH.axis_names), min_size=1, max_size=4, unique=True)


@st.composite
def leaves(draw: Any) -> tuple[tuple[int, ...], PartitionSpec]:
    """A shape, and a spec that lays it over some of the mesh."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 24, 48]), max_size=3)))
    free: list[str] = list(draw(st.permutations(MESH.axis_names)))
    entries: list[Any] = []
    more = st.booleans()
    for size in shape:
        names: tuple[str, ...] = ()
        while free and draw(more):
            if size % math.prod(MESH.shape[axis] for axis in (*names, free[0])):
                break
            names = (*names, free.pop(0))
        entries.append(names or None)
    return shape, P(*entries)


def used(spec: PartitionSpec) -> list[str]:
    return [axis for e in spec if e is not None for axis in ([e] if isinstance(e, str) else e)]


@given(leaves(), AXES)
@settings(deadline=None)
def test_layouts_are_valid_and_never_larger(
    given_leaf: tuple[tuple[int, ...], PartitionSpec], axes: list[str]
) -> None:
    shape, spec = given_leaf
    before = extend_over(spec, leaf(*shape), MESH, "one", min_bytes=1 << 30)
    after = extend_over(spec, leaf(*shape), MESH, axes)
    [row] = after.rows
    # JAX agrees that it divides, and what the mesh holds together is the leaf.
    assert after.shardings.shard_shape(shape) == row.shard_shape
    assert len(used(row.spec)) == len(set(used(row.spec)))
    assert set(used(spec)) <= set(used(row.spec)) <= set(used(spec)) | set(axes)
    ways = math.prod(MESH.shape[axis] for axis in used(row.spec))
    assert math.prod(row.shard_shape) * ways == math.prod(shape)
    assert after.bytes == before.bytes
    assert after.bytes_per_device <= before.bytes_per_device
    # Dimensions only gain axes, behind those that they had.
    for old, new in zip(before.rows[0].spec, row.spec, strict=True):
        assert used(P(new))[: len(used(P(old)))] == used(P(old))
    assert extend_over(after, leaf(*shape), MESH, axes).specs == after.specs
    # Every axis that was not placed is accounted for.
    unused = {axis for axis in axes if axis not in used(row.spec)} if math.prod(shape) > 1 else ()
    assert all(f"{axis}={MESH.shape[axis]}" in " ".join(row.notes) for axis in unused) or not shape


@given(leaves(), st.sampled_from(MESH.axis_names))
@settings(deadline=None)
def test_an_axis_is_placed_wherever_it_divides(
    given_leaf: tuple[tuple[int, ...], PartitionSpec], axis: str
) -> None:
    """On the longest dimension that it divides: a whole one before a sharded one."""
    shape, spec = given_leaf
    [before] = extend_over(spec, leaf(*shape), MESH, "one", min_bytes=1 << 30).rows
    [after] = extend_over(spec, leaf(*shape), MESH, axis).rows
    size = MESH.shape[axis]
    divides = [(not entry, n) for entry, n in zip(before.spec, before.shard_shape, strict=True)]
    divides = [(whole, n) for whole, n in divides if n % size == 0]
    if axis in used(spec) or 0 in shape or not divides:
        assert after.spec == before.spec
        return
    [dim] = [
        n for n, (old, new) in enumerate(zip(before.spec, after.spec, strict=True)) if old != new
    ]
    assert (not before.spec[dim], before.shard_shape[dim]) == max(divides)
