"""Where every leaf of a tree lies on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from opt_partition._trees import KeyPath, children, flatten_with_paths, key_name, path_str
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
    return f"P({', '.join(map(repr, spec))})"


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array, of a `jax.ShapeDtypeStruct` or of a Python number.

    Raises:
      TypeError: `leaf` is nothing that JAX can hold.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.typeof(leaf)
    return tuple(leaf.shape), leaf.dtype


def align(tree: Any, like: Any, argument: str, *, prefix: bool = False) -> list[Any]:
    """What `tree` holds in the place of each leaf of `like`, in JAX's order.

    Containers may differ in type as long as their keys agree, so that a dict stands for a
    FrozenDict; and `None` may be held, though JAX takes it for an empty container.

    Args:
      tree: any pytree.
      like: the tree whose leaves count.
      argument: the caller's name of `tree`, for the message.
      prefix: whether a leaf of `tree` may stand for a whole subtree of `like`.

    Raises:
      AxesError: `tree` has not the structure of `like`; lists every path.

    Examples:
      >>> align({'w': 'x', 'b': None}, {'w': 1, 'b': 2}, 'axes')
      [None, 'x']
      >>> align({'w': 'x', 'b': None}, {'w': [1, 2], 'b': 3}, 'memory_kinds', prefix=True)
      [None, 'x', 'x']
    """
    if not prefix:
        treedef: Any = jax.tree.structure(like)
        try:
            return list(treedef.flatten_up_to(tree))
        except ValueError:
            pass  # containers of other types, or a difference: the walk tells
    problems: list[str] = []
    entries = list(_walk(tree, like, (), prefix, problems))
    if problems:
        raise AxesError(
            "\n  ".join(
                [f"`{argument}` has another structure than the leaves it is for:", *problems]
            )
        )
    return entries


def _walk(tree: Any, like: Any, path: KeyPath, prefix: bool, problems: list[str]) -> Iterator[Any]:
    """Yields the entries of `align`; adds to `problems`."""
    node, given = children(like), children(tree)
    if node is None:
        if like is not None:
            yield tree
        elif tree is not None:
            problems.append(f"{path_str(path)}: expected nothing, found {_brief(tree)}")
        return
    if given is None and prefix:
        yield from [tree] * len(jax.tree.leaves(like))
        return
    expected = {key_name(key): (key, child) for key, child in node.children}
    found = {key_name(key): child for key, child in given.children} if given else {}
    if given is None and (expected or tree is not None):
        keys = ", ".join(expected)
        problems.append(f"{path_str(path)}: expected keys {keys}; found {_brief(tree)}")
        return
    problems += [
        f"{path_str((*path, key))}: missing"
        for name, (key, _) in expected.items()
        if name not in found
    ]
    problems += [
        f"{path_str((*path, key))}: unexpected"
        for key, _ in (given.children if given else [])
        if key_name(key) not in expected
    ]
    for name, (key, child) in expected.items():
        if name in found:
            yield from _walk(found[name], child, (*path, key), prefix, problems)


def _brief(value: Any) -> str:
    """A few words for what stands where something else should."""
    if isinstance(value, PartitionSpec):
        return spec_str(value)
    return "None" if value is None else f"a {type(value).__name__}"


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
