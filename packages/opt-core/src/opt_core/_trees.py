"""Paths of leaves, one level of a pytree at a time, and what arrays are to JAX."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

KeyPath = Sequence[Any]
Names: TypeAlias = tuple[str, ...]
"""The names along a path, starting at the root."""


class Node(NamedTuple):
    """One pytree node, opened."""

    children: list[tuple[str, Any]]  # name and subtree of each child, in the node's own order
    rebuild: Callable[[Sequence[Any]], Any]  # rebuilds the node from new children in that order


def parts_at(structure: Any, tree: Any) -> list[Any] | None:
    """Returns the subtrees at the leaves of a structure, with numbers for the tree's leaves."""
    # `None` if it has other containers. JAX's error would print the arrays, which may be large or
    # deleted.
    own: Any = jax.tree.structure(tree)
    try:
        return list(structure.flatten_up_to(own.unflatten(range(own.num_leaves))))
    except (ValueError, TypeError, KeyError):
        return None


def key_name(key: Any) -> str:
    """Returns the name of one key of a JAX key path, e.g. `'kernel'` or `'0'`."""
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=index):
            return str(index)
        case GetAttrKey(name=name):
            return str(name)
        case _:
            return str(key)


def path_names(key_path: KeyPath) -> tuple[str, ...]:
    """Returns the names along a JAX key path."""
    return tuple(key_name(key) for key in key_path)


def path_str(names: Sequence[str]) -> str:
    """Returns the names along a path joined by `/`; the root is `.`.

    Within a name `~` is `~0` and `/` is `~1`, as in JSON Pointer (RFC 6901), so no two leaves of a
    tree share a path.

    Examples:
      >>> path_str(('mlp', 'a/b', '0'))
      'mlp/a~1b/0'
    """
    if not names:
        return "."
    path = "/".join(names)
    if path.count("/") == len(names) - 1 and "~" not in path:  # nearly always, and much faster
        return path
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)


def split_path(path: str) -> tuple[str, ...]:
    """Returns the names of a path that were joined by `/`.

    Examples:
      >>> split_path('mlp/a~1b/0')
      ('mlp', 'a/b', '0')
    """
    if path == ".":
        return ()
    parts = path.split("/")
    if "~" not in path:
        return tuple(parts)
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)


def children(node: Any) -> Node | None:
    """Opens one level of a pytree."""
    if node is None:
        return None
    keyed, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    rebuild = functools.partial(jax.tree_util.tree_unflatten, treedef)
    return Node([(key_name(key), child) for (key,), child in keyed], rebuild)


def flatten_with_paths(tree: Any) -> list[tuple[Names, Any]]:
    """Returns the names along the path, and the leaf, for every leaf of a tree and every `None`."""
    keyed = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    return [(path_names(path), leaf) for path, leaf in keyed]


def named_leaves(tree: Any) -> list[tuple[Names, Any]]:
    """Returns the leaves of a tree with their paths, in the order of JAX."""
    return [(path_names(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def listed(names: Iterable[str], none: str = "none") -> str:
    """Returns names as a list for messages."""
    return ", ".join(f"`{name}`" for name in names) or none


def aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yields the lines of a table; `sides` aligns columns: `<` to the left, `>` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in columns).rstrip()


def differences(expected: Any, found: Any, shown: Callable[[Any], str]) -> list[str]:
    """Returns an indented line for each path at which trees differ, or one for their containers."""
    wanted, present = (
        {
            path_str(names): "None" if leaf is None else shown(leaf)
            for names, leaf in flatten_with_paths(tree)
        }
        for tree in (expected, found)
    )
    structures: list[Any] = [jax.tree.structure(tree) for tree in (expected, found)]
    lines = [
        f"  `{path}`: expected {wanted.get(path, 'nothing')}, found {present.get(path, 'nothing')}"
        for path in {**wanted, **present}
        if wanted.get(path) != present.get(path)
    ]
    if not lines and structures[0] != structures[1]:
        lines.append(f"  containers: expected {structures[0]}, found {structures[1]}")
    return lines


# Arrays: the dtypes that JAX gives them, where they lie, and whether they share buffers.


def held_dtype(array: Any) -> Any:
    """Returns the dtype of an array as JAX holds it."""
    # Without `jax_enable_x64` that is 32 bits for the 64 of NumPy; an array of JAX has what it has.
    if isinstance(array, jax.Array) or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array.dtype
    return jax.dtypes.canonicalize_dtype(array.dtype)


def survives(before: Any, after: Any) -> Any:
    """Returns which values a conversion has kept, of arrays of NumPy or JAX."""
    # Integers survive exactly. Floats are rounded; what is finite stays finite, and what is not 0
    # does not become 0, unless it was subnormal already.
    xp: Any = np if isinstance(before, np.ndarray | np.generic) else jnp
    is_float, becomes_float = (jnp.issubdtype(x.dtype, jnp.inexact) for x in (before, after))
    if is_float and becomes_float:
        is_tiny = xp.abs(before) < jnp.finfo(before.dtype).tiny
        return ~xp.isfinite(before) | (xp.isfinite(after) & ((after != 0) | is_tiny))
    is_kept = after.astype(before.dtype) == before
    if not (is_float or becomes_float):
        return is_kept & ((after < 0) == (before < 0))
    floats, integers = (before, after) if is_float else (after, before)
    floats = floats.astype(np.float32) if floats.dtype.itemsize < 4 else floats
    limits = None if integers.dtype == bool else jnp.iinfo(integers.dtype)
    low, high = (0, 1) if limits is None else (limits.min, limits.max)
    # The largest integer may round up to a float that is none.
    return is_kept & xp.isfinite(floats) & (floats >= float(low)) & (floats < float(high) + 1)


def all_survive(before: Any, after: Any) -> Any:
    """Returns whether a conversion has kept every value; see `survives`."""
    return np.bool_(True) if before.dtype == after.dtype else survives(before, after).all()


def convert_held(array: np.ndarray, dtype: Any) -> tuple[np.ndarray, Any]:
    """Returns an array in another dtype, and the first value that is lost or `None`."""
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
        is_kept = survives(array, converted)
    return converted, None if is_kept.all() else np.extract(~is_kept, array)[0]


def strip_weak_type(tree: Any) -> Any:
    """Returns a tree whose arrays have no weak types; other leaves are unchanged."""
    return jax.tree.map(_strip_weak_type, tree)


def _strip_weak_type(leaf: Any) -> Any:
    if getattr(leaf, "weak_type", False):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(weak_type=False)
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf has no value at all."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def placed(leaf: Any, sharding: Sharding | None) -> Any:
    """Returns a leaf with the right placement: itself if it has it."""
    if sharding is None or not hasattr(leaf, "dtype"):
        return leaf
    if is_abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf if committed_sharding(leaf) == sharding else jax.device_put(leaf, sharding)


def committed_sharding(leaf: Any) -> Sharding | None:
    """Returns where a leaf is committed to, if anywhere; where an abstract leaf is wanted."""
    if is_abstract(leaf):
        wanted: Sharding | None = leaf.sharding
        return wanted
    is_concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return leaf.sharding if is_concrete and leaf.committed else None


def on_devices_of(anchor: Any, spec: Sequence[Any], shape: Sequence[int]) -> Any:
    """A sharding on the devices of another, by the axes of a spec that it has and that divide."""
    if not isinstance(anchor, NamedSharding):
        return anchor
    entries, sizes = [], anchor.mesh.shape
    for size, entry in zip(shape, spec, strict=False):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        fits = all(axis in sizes for axis in axes)
        fits = fits and size % math.prod(sizes[axis] for axis in axes) == 0
        entries.append(entry if fits else None)
    return NamedSharding(anchor.mesh, PartitionSpec(*entries))


def has_no_devices(place: Any) -> bool:
    """Whether a sharding is on an `AbstractMesh`."""
    return isinstance(place, NamedSharding) and isinstance(place.mesh, AbstractMesh)


def unalias(tree: Any, *, apart_from: Any = ()) -> Any:
    """Copies every array of a tree that has occurred before, in itself or in `apart_from`."""
    # Some optimizers keep the initial parameters in their state. Donating parameters and state then
    # donates one buffer twice, which XLA refuses.
    seen: set[int] = set().union(*map(_buffers, jax.tree.leaves(apart_from)))

    def own(leaf: Any) -> Any:
        buffers = _buffers(leaf)
        if not buffers.isdisjoint(seen):
            return jnp.copy(leaf)
        seen.update(buffers)
        return leaf

    return jax.tree.map(own, tree)


def _buffers(leaf: Any) -> Set[int]:
    """The buffers of an array; a tracer counts as one, since `vmap` may return it unchanged."""
    if not isinstance(leaf, jax.Array):
        return frozenset()
    if isinstance(leaf, jax.core.Tracer) or leaf.is_deleted():
        return {id(leaf)}
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
