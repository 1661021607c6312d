"""Where every leaf of a tree lies on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from opt_partition._trees import flatten_with_paths, path_str

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """Where one leaf lies.

    Attributes:
      path: `/`-joined keys of the leaf.
      shape: its global shape.
      dtype: its dtype.
      spec: the mesh axes of each dimension; as long as `shape`.
      shard_shape: the shape of what one device holds.
      memory_kind: the memory it lies in, e.g. `'pinned_host'`; `None` is the device's default.
      notes: what was asked for and could not be had, and why.
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
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * itemsize(self.dtype)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds."""
        return math.prod(self.shard_shape) * itemsize(self.dtype)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every leaf of a tree lies on a mesh.

    Attributes:
      mesh: the mesh, with devices or abstract.
      leaves: a `LeafLayout` in the place of every leaf.
    """

    mesh: AnyMesh
    leaves: Any

    @property
    def rows(self) -> list[LeafLayout]:
        """The leaves in a list, in JAX's order."""
        return jax.tree.leaves(self.leaves)

    @property
    def specs(self) -> Any:
        """A `PartitionSpec` of mesh axes per leaf."""
        return jax.tree.map(lambda leaf: leaf.spec, self.leaves)

    @property
    def shardings(self) -> Any:
        """A `NamedSharding` per leaf; memory kinds included."""
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
        """Bytes of the whole tree."""
        return sum(leaf.bytes for leaf in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds, in whatever memory."""
        return sum(leaf.bytes_per_device for leaf in self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """Every request that could not be honoured, as `path: what and why`."""
        return tuple(f"{leaf.path}: {note}" for leaf in self.rows for note in leaf.notes)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; of a typed PRNG key, bytes of its data.

    Examples:
      >>> itemsize('bfloat16'), itemsize(jax.random.key(0).dtype)
      (2, 8)
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    return int(jax.numpy.dtype(dtype).itemsize)


def mesh_axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`.

    Examples:
      >>> mesh_axes_of(None), mesh_axes_of('data'), mesh_axes_of(('data', 'model'))
      ((), ('data',), ('data', 'model'))
    """
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shard_shape(shape: Sequence[int], spec: PartitionSpec, mesh: AnyMesh) -> tuple[int, ...]:
    """The shape of what one device holds; every dimension must divide.

    `NamedSharding.shard_shape` does the same, but not on meshes with `Manual` axes.

    Examples:
      >>> mesh = AbstractMesh((4, 2), ('data', 'model'))
      >>> shard_shape((8, 6), PartitionSpec('data', None), mesh)
      (2, 6)
    """
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    ways = [math.prod(mesh.shape[axis] for axis in mesh_axes_of(entry)) for entry in entries]
    return tuple(size // n for size, n in zip(shape, ways, strict=True))


def leaves_with_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields path and leaf of every leaf, in JAX's order."""
    return ((path_str(path), leaf) for path, leaf in flatten_with_paths(tree))
