"""The layout of every leaf of a tree on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from opt_partition._specs import (
    AnyMesh,
    checked_spec,
    itemsize,
    named_sizes,
    shape_and_dtype,
    shard_shape,
)
from opt_partition._trees import align, brief, map_leaves
from opt_partition.errors import AxesError


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
        leaves = map_leaves(functools.partial(_leaf_layout, mesh), shapes, entries, head)
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


def _leaf_layout(mesh: AnyMesh, path: str, leaf: Any, entry: Any) -> LeafLayout:
    """Returns the layout of one leaf; see `Layout.from_specs`."""
    shape, dtype = shape_and_dtype(leaf)
    memory_kind = None
    match entry:
        case LeafLayout():
            if (entry.shape, entry.dtype) != (shape, dtype):
                raise AxesError(
                    f"laid out for {entry.dtype}{list(entry.shape)}, found {dtype}{list(shape)}"
                )
            return dataclasses.replace(entry, path=path)
        case NamedSharding(mesh=other):
            _check_mesh(other, mesh)
            spec, memory_kind = entry.spec, entry.memory_kind
        case PartitionSpec():
            spec = entry
        case None:
            spec = PartitionSpec()
        case _:
            raise AxesError(
                "expected a PartitionSpec of mesh axes, a NamedSharding or None, found "
                f"{brief(entry)}"
            )
    full = checked_spec(spec, shape, mesh)
    return LeafLayout(path, shape, dtype, full, shard_shape(shape, full, mesh), memory_kind)


def _check_mesh(found: AnyMesh, mesh: AnyMesh) -> None:
    """Raises `AxesError` if a layout on `found` is not valid on `mesh`."""
    if dict(found.shape) != dict(mesh.shape):
        expected, other = (named_sizes(m, m.axis_names) for m in (mesh, found))
        raise AxesError(f"expected the mesh {expected}; found {other}")
    if isinstance(found, Mesh) and isinstance(mesh, Mesh) and found != mesh:
        raise AxesError("the mesh has different devices or axis types than expected")
