"""The layout of every leaf of a tree on a mesh, and what it is made of: specs, shapes, dtypes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from opt_partition._trees import KeyPath, align, map_leaves, path_str
from opt_partition.errors import AxesError

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The layout of one leaf.

    Attributes:
      path: `/`-joined keys of the leaf.
      shape: its global shape.
      dtype: its dtype.
      spec: mesh axes of each dimension; as long as `shape`.
      shard_shape: shape of the shard on one device.
      memory_kind: its memory kind, e.g. `'pinned_host'`; `None` for the device's default.
      notes: requests that could not be satisfied, and why.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    memory_kind: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Global bytes of the leaf."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds."""
        return math.prod(self.shard_shape) * itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of every leaf of a tree on a mesh.

    Attributes:
      mesh: the mesh, concrete or abstract.
      leaves: a tree with a `LeafLayout` per leaf.
    """

    mesh: AnyMesh
    leaves: Any

    def __post_init__(self) -> None:
        if AxisType.Manual in self.mesh.axis_types:
            raise AxesError("inside shard_map leaves are local: lay them out outside of it")

    @classmethod
    def from_specs(cls, specs: Any, shapes: Any, mesh: AnyMesh) -> Layout:
        """Creates a layout from specs of mesh axes.

        Args:
          specs: per leaf a `PartitionSpec`, a `NamedSharding`, whose memory kind is kept, or `None`
            for a replicated leaf; or a `Layout`, which is validated.
          shapes: a tree with the structure of `specs`, of arrays or `jax.ShapeDtypeStruct`s.
          mesh: the mesh; meshes of shardings and layouts must be equal to it, or have the same axes
            and sizes if one of the two is abstract.

        Raises:
          AxesError: `specs`, `shapes` and `mesh` do not match; the message lists all paths.
        """
        entries = align(specs.leaves if isinstance(specs, Layout) else specs, shapes, "specs")
        if isinstance(specs, Layout):
            _check_mesh(specs.mesh, mesh)
        head = "`specs` do not match the leaves and the mesh:"
        layout = functools.partial(_leaf_layout, mesh)
        leaves = map_leaves(layout, tree_leaves_with_path(shapes), entries, head)
        return cls(mesh, jax.tree.unflatten(jax.tree.structure(shapes), leaves))

    @property
    def rows(self) -> list[LeafLayout]:
        """The leaf layouts as a list, in JAX's order."""
        return jax.tree.leaves(self.leaves)

    @property
    def specs(self) -> Any:
        """A `PartitionSpec` of mesh axes per leaf."""
        return jax.tree.map(lambda leaf: leaf.spec, self.leaves)

    @property
    def shardings(self) -> Any:
        """A `NamedSharding` per leaf, including memory kinds."""
        return jax.tree.map(
            lambda leaf: NamedSharding(self.mesh, leaf.spec, memory_kind=leaf.memory_kind),
            self.leaves,
        )

    @property
    def shapes(self) -> Any:
        """A `jax.ShapeDtypeStruct` with its sharding per leaf."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.leaves,
            self.shardings,
        )

    @property
    def bytes(self) -> int:
        """Global bytes of the tree."""
        return sum(leaf.bytes for leaf in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes per device, in all memory kinds."""
        return sum(leaf.bytes_per_device for leaf in self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """Every request that could not be satisfied, as `path: reason`."""
        return tuple(f"{leaf.path}: {note}" for leaf in self.rows for note in leaf.notes)


def _leaf_layout(mesh: AnyMesh, path: KeyPath, leaf: Any, entry: Any) -> LeafLayout:
    """Returns the layout of one leaf; see `Layout.from_specs`."""
    shape, dtype = shape_and_dtype(leaf)
    memory_kind = None
    match entry:
        case LeafLayout():
            if (entry.shape, entry.dtype) != (shape, dtype):
                raise AxesError(
                    f"laid out for {entry.dtype}{list(entry.shape)}, found {dtype}{list(shape)}"
                )
            return dataclasses.replace(entry, path=path_str(path))
        case NamedSharding(mesh=other):
            _check_mesh(other, mesh)
            spec, memory_kind = entry.spec, entry.memory_kind
        case PartitionSpec():
            spec = entry
        case None:
            spec = PartitionSpec()
        case _:
            raise AxesError(
                "expected a PartitionSpec of mesh axes, a NamedSharding or None, found a "
                f"{type(entry).__name__}"
            )
    full = checked_spec(spec, shape, mesh)
    return LeafLayout(
        path_str(path), shape, dtype, full, shard_shape(shape, full, mesh), memory_kind
    )


def _check_mesh(found: AnyMesh, mesh: AnyMesh) -> None:
    """Raises `AxesError` if a layout on `found` is not valid on `mesh`."""
    if dict(found.shape) != dict(mesh.shape):
        expected, other = (named_sizes(m, m.axis_names) for m in (mesh, found))
        raise AxesError(f"expected the mesh {expected}; found {other}")
    if isinstance(found, Mesh) and isinstance(mesh, Mesh) and found != mesh:
        raise AxesError("the mesh has different devices or axis types than expected")


@functools.cache
def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element; for a typed PRNG key, of its data."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(math.prod(data.shape) * data.dtype.itemsize)
    return int(jax.numpy.dtype(dtype).itemsize)


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of an array, a `jax.ShapeDtypeStruct` or a Python number."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        try:
            leaf = jax.typeof(leaf)
        except TypeError:
            raise TypeError(
                f"expected an array or a jax.ShapeDtypeStruct, found {type(leaf).__name__} (for an "
                "Equinox module, pass only its arrays: `eqx.filter(model, eqx.is_array)`)"
            ) from None
    return tuple(leaf.shape), leaf.dtype


def mesh_axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def distinct_axes(what: str, axes: str | Sequence[str], mesh: AnyMesh) -> tuple[str, ...]:
    """Returns mesh axes as a tuple; raises `AxesError` if they are not distinct axes of `mesh`."""
    names = mesh_axes_of(axes)
    if not names or not mesh.shape.keys() >= {*names} or len({*names}) < len(names):
        raise AxesError(
            f"{what} must be distinct mesh axes: the mesh has "
            f"{named_sizes(mesh, mesh.axis_names)}; found {axes!r}"
        )
    return names


def padded(spec: PartitionSpec, rank: int) -> list[Any]:
    """Returns an entry of a spec for each of `rank` dimensions."""
    return [*spec, *[None] * (rank - len(spec))]


def shard_shape(shape: Sequence[int], spec: PartitionSpec, mesh: AnyMesh) -> tuple[int, ...]:
    """Returns the shape of the shard on one device; every dimension must be divisible."""
    return tuple(
        size // math.prod([mesh.shape[axis] for axis in mesh_axes_of(entry)]) if entry else size
        for size, entry in zip(shape, padded(spec, len(shape)), strict=True)
    )


def named_sizes(mesh: AnyMesh, axes: Iterable[str]) -> str:
    """Formats mesh axes with their sizes."""
    return ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)


def spec_of(axes: Iterable[Sequence[str]]) -> PartitionSpec:
    """Returns the `PartitionSpec` with the given mesh axes for each dimension."""
    return PartitionSpec(
        *((names[0] if len(names) == 1 else tuple(names)) if names else None for names in axes)
    )


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Raises `ValueError` if the value of an argument is not one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(map(repr, choices))}; got {value!r}"
        )


def checked_spec(spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Pads `spec` to the length of `shape`; raises `AxesError` if it is not valid on `mesh`."""
    if getattr(spec, "unreduced", None):
        raise AxesError(f"{spec} is unreduced: reduce first")
    if len(spec) > len(shape):
        raise AxesError(f"{spec} has more entries than {shape} has dimensions")
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise AxesError(f"{spec} has unconstrained dimensions; specify their mesh axes")
    names = list(map(mesh_axes_of, padded(spec, len(shape))))
    if flat := [axis for axes in names for axis in axes]:
        distinct_axes(f"the entries of {spec}", flat, mesh)
    for dim, (size, axes) in enumerate(zip(shape, names, strict=True)):
        if size % math.prod(mesh.shape[axis] for axis in axes):
            raise AxesError(
                f"dimension {dim} of {shape} is not divisible by {named_sizes(mesh, axes)}"
            )
    return spec_of(names)
