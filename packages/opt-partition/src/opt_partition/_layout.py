"""Where every leaf of a tree lies on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from opt_partition._align import align, brief
from opt_partition._trees import flatten_with_paths, path_str
from opt_partition.errors import AxesError

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
      actions: what `extend_over` did to it, or why it had no reason to.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    memory_kind: str | None = None
    notes: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()

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
    """Where every leaf of a tree lies on a mesh; `print` shows it as a table.

    Attributes:
      mesh: the mesh, with devices or abstract.
      leaves: a `LeafLayout` in the place of every leaf.
    """

    mesh: AnyMesh
    leaves: Any

    @classmethod
    def from_specs(
        cls, specs: Any, shapes: Any, mesh: AnyMesh, *, argument: str = "specs"
    ) -> Layout:
        """The layout that specs of mesh axes describe.

        Args:
          specs: per leaf a `PartitionSpec`, a `NamedSharding`, whose memory kind is kept, or `None`
            for a whole leaf; or a `Layout`, which is checked.
          shapes: arrays or `jax.ShapeDtypeStruct`s in a tree like `specs`.
          mesh: the mesh; that of shardings and of a layout must be the same, or have the same axes
            and sizes where either is abstract.
          argument: the caller's name of `specs`, for messages.

        Raises:
          AxesError: `specs`, `shapes` and `mesh` do not fit together; lists every path.
        """
        entries = align(specs.leaves if isinstance(specs, Layout) else specs, shapes, argument)
        if isinstance(specs, Layout):
            _check_mesh(specs.mesh, mesh, f"`{argument}`: ")
        leaves: list[LeafLayout] = []
        problems: list[str] = []
        for (path, leaf), entry in zip(leaves_with_paths(shapes), entries, strict=True):
            try:
                leaves.append(_leaf_layout(path, leaf, entry, mesh))
            except (TypeError, AxesError) as error:
                problems.append(f"{path}: {error}")
        if problems:
            head = f"`{argument}` do not fit the leaves and the mesh:"
            raise AxesError("\n  ".join([head, *problems]))
        return cls(mesh, jax.tree.unflatten(jax.tree.structure(shapes), leaves))

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

    @property
    def actions(self) -> tuple[str, ...]:
        """Everything that `extend_over` did or had no reason to do, as `path: what`."""
        return tuple(f"{leaf.path}: {action}" for leaf in self.rows for action in leaf.actions)

    def __str__(self) -> str:
        head = ("path", "shape", "dtype", "spec", "bytes", "per device", "memory", "remarks")
        rows = [head, *map(_cells, self.rows)]
        rows.append(("total", "", "", "", f"{self.bytes:,}", f"{self.bytes_per_device:,}", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        numbers = {head.index("bytes"), head.index("per device")}
        aligned = (
            "  ".join(
                cell.rjust(width) if column in numbers else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return "\n".join([f"mesh: {mesh}", *map(str.rstrip, aligned)])


def itemsize(dtype: Any) -> int:
    """Bytes of one element; of a typed PRNG key, bytes of its data.

    Examples:
      >>> itemsize('bfloat16'), itemsize(jax.random.key(0).dtype)
      (2, 8)
    """
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(math.prod(data.shape) * data.dtype.itemsize)
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


def manual_axes(mesh: AnyMesh) -> frozenset[str]:
    """The mesh axes of type `Manual`: a leaf is already local to them, no spec may name them."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(axis for axis, kind in types if kind == AxisType.Manual)


def named_sizes(mesh: AnyMesh, axes: Iterable[str]) -> str:
    """Mesh axes and their sizes, for people.

    Examples:
      >>> named_sizes(AbstractMesh((4, 2), ('data', 'model')), ('model', 'data'))
      'model=2, data=4'
    """
    return ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)


def spec_of(axes: Iterable[Sequence[str]]) -> PartitionSpec:
    """The `PartitionSpec` that lays each dimension over the given mesh axes.

    Examples:
      >>> tuple(spec_of([('data',), (), ('fsdp', 'model')]))
      ('data', None, ('fsdp', 'model'))
    """
    return PartitionSpec(
        *((names[0] if len(names) == 1 else tuple(names)) if names else None for names in axes)
    )


def spec_str(spec: PartitionSpec) -> str:
    """A spec as people write it, in every version of JAX.

    Examples:
      >>> spec_str(PartitionSpec('data', None))
      "P('data', None)"
    """
    return f"P({', '.join(map(repr, getattr(spec, 'partitions', spec)))})"


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array, of a `jax.ShapeDtypeStruct` or of a Python number.

    Raises:
      TypeError: `leaf` is nothing that JAX can hold.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.typeof(leaf)
    return tuple(leaf.shape), leaf.dtype


def _leaf_layout(path: str, leaf: Any, entry: Any, mesh: AnyMesh) -> LeafLayout:
    """One leaf of `Layout.from_specs`."""
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
    full = _checked_spec(spec, shape, mesh)
    return LeafLayout(path, shape, dtype, full, shard_shape(shape, full, mesh), memory_kind)


def _check_mesh(found: AnyMesh, mesh: AnyMesh, where: str = "") -> None:
    """Raises `AxesError` where a layout on `found` is none on `mesh`."""
    if dict(found.shape) != dict(mesh.shape):
        expected, other = (named_sizes(m, m.axis_names) for m in (mesh, found))
        raise AxesError(f"{where}expected the mesh {expected}; found {other}")
    if isinstance(found, Mesh) and isinstance(mesh, Mesh) and found != mesh:
        raise AxesError(f"{where}the mesh has other devices or axis types than expected")


def _checked_spec(spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Returns `spec` as long as `shape`; raises `AxesError` where it cannot lay it over `mesh`."""
    if getattr(spec, "unreduced", None):
        raise AxesError(
            f"{spec_str(spec)} is unreduced over {sorted(spec.unreduced)}: reduce first"
        )
    entries: list[Any] = list(getattr(spec, "partitions", spec))
    if len(entries) > len(shape):
        raise AxesError(f"{spec_str(spec)} has more entries than {shape} has dimensions")
    if PartitionSpec.UNCONSTRAINED in entries:
        raise AxesError(f"{spec_str(spec)} leaves dimensions open; say which mesh axes they have")
    names = [mesh_axes_of(entry) for entry in (*entries, *[None] * (len(shape) - len(entries)))]
    flat = [axis for axes in names for axis in axes]
    absent = [axis for axis in flat if axis not in mesh.shape]
    if absent:
        raise AxesError(
            f"{spec_str(spec)} has {', '.join(map(repr, absent))}, and `mesh` only "
            f"{named_sizes(mesh, mesh.axis_names)}"
        )
    if not manual_axes(mesh).isdisjoint(flat):
        raise AxesError(f"{spec_str(spec)} has a Manual axis: inside shard_map leaves are local")
    if len(set(flat)) < len(flat):
        raise AxesError(f"{spec_str(spec)} has a mesh axis twice")
    for dim, (size, axes) in enumerate(zip(shape, names, strict=True)):
        if size % math.prod(mesh.shape[axis] for axis in axes):
            raise AxesError(
                f"dimension {dim} of {shape} does not divide by {named_sizes(mesh, axes)}"
            )
    return spec_of(names)


def _cells(leaf: LeafLayout) -> tuple[str, ...]:
    """One row of the table."""
    return (
        leaf.path,
        str(leaf.shape),
        str(leaf.dtype),
        spec_str(leaf.spec),
        f"{leaf.bytes:,}",
        f"{leaf.bytes_per_device:,}",
        leaf.memory_kind or "device",
        "; ".join((*leaf.actions, *leaf.notes)),
    )
