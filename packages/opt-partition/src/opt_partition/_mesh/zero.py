"""ZeRO: state sharded further, over mesh axes that its parameters leave free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._mesh.layout import Layout, LeafLayout
from opt_partition._mesh.placement import best_placement
from opt_partition._mesh.specs import (
    AnyMesh,
    manual_axes,
    mesh_axes_of,
    named_sizes,
    shard_shape,
    spec_of,
)
from opt_partition.errors import AxesError


def extend_over(
    specs: Any,
    shapes: Any,
    mesh: AnyMesh,
    axes: str | Sequence[str],
    *,
    min_bytes: int = 0,
) -> Layout:
    """Shards every leaf further over the given mesh axes, as far as it divides.

    On state, with gradients left as they are, this is ZeRO-1; with gradients constrained to the
    same specs, ZeRO-2. Each leaf gets whichever of all possible placements comes first by

    1. fewest bytes on a device;
    2. fewest dimensions touched, so that one collective gathers the leaf back;
    3. fewest of them sharded before, so that shards do not become slivers;
    4. longest shards: the shortest touched dimension is as long as can be afterwards;
    5. earliest dimensions, where shards are contiguous.

    New mesh axes come behind (minor to) those that a dimension has: gathering over them gives back
    exactly the shards of `specs`, which is what the parameters beside the state have.

    Args:
      specs: per leaf a `PartitionSpec` of mesh axes, a `NamedSharding`, whose memory kind is kept,
        or `None` for a whole leaf; or a `Layout`, whose notes and memory kinds are kept.
      shapes: arrays or `jax.ShapeDtypeStruct`s in a tree like `specs`.
      mesh: a `Mesh` or `AbstractMesh`.
      axes: a mesh axis or several; those that a leaf has already and `Manual` ones are not used.
      min_bytes: a leaf of fewer bytes, counted whole, stays as it is.

    Returns:
      The layout. Leaves' `actions` name the dimensions sharded, and why a leaf needed nothing: the
      axis was there already, it is a scalar, empty or below `min_bytes`. Their `notes` name the
      mesh axes over which they stay replicated, and why.

    Raises:
      AxesError: `specs`, `shapes`, `mesh` and `axes` do not fit together.

    Examples:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> layout = extend_over(
      ...     {'mu': P(None, 'model'), 'count': P(), 'odd': P()},
      ...     {'mu': jax.ShapeDtypeStruct((16, 6), 'float32'),
      ...      'count': jax.ShapeDtypeStruct((), 'int32'),
      ...      'odd': jax.ShapeDtypeStruct((7, 3), 'float32')},
      ...     AbstractMesh((8, 2), ('data', 'model')),
      ...     'data',
      ... )
      >>> [(leaf.path, tuple(leaf.spec), leaf.actions) for leaf in layout.rows]
      [('count', (), ('ZeRO: a scalar stays whole',)),
       ('mu', ('data', 'model'), ('ZeRO: dimension 0 over data=8',)),
       ('odd', (None, None), ())]
      >>> layout.notes
      ('odd: ZeRO: stays replicated over data=8: no dimension of (7, 3) divides',)
    """
    names = _parse_axes(axes, mesh)
    if min_bytes < 0:
        raise ValueError(f"`min_bytes` must not be negative: {min_bytes}")
    base = Layout.from_specs(specs, shapes, mesh)
    extended: dict[Any, _Extension] = {}

    def extend(leaf: LeafLayout) -> LeafLayout:
        small = leaf.bytes < min_bytes
        key = (leaf.spec, leaf.shape, leaf.bytes if small else None)
        if key not in extended:
            extended[key] = (
                _below(leaf, min_bytes) if small else _extend(leaf.spec, leaf.shape, mesh, names)
            )
        to = extended[key]
        return dataclasses.replace(
            leaf,
            spec=to.spec,
            shard_shape=to.shard_shape,
            notes=tuple(dict.fromkeys((*leaf.notes, *to.notes))),
            actions=tuple(dict.fromkeys((*leaf.actions, *to.actions))),
        )

    return Layout(mesh, jax.tree.map(extend, base.leaves))


@dataclasses.dataclass(frozen=True)
class _Extension:
    """What became of one shape with one spec."""

    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    actions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _parse_axes(axes: str | Sequence[str], mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the mesh axes to shard over, each once and known to `mesh`."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    absent = [axis for axis in names if axis not in mesh.shape]
    if absent:
        raise AxesError(
            f"`axes` has {', '.join(map(repr, absent))}, which `mesh` has not: it has "
            f"{named_sizes(mesh, mesh.axis_names)}"
        )
    if not names or len(set(names)) < len(names):
        raise AxesError(f"`axes` must be one or more mesh axes, each once: {axes!r}")
    return names


def _below(leaf: LeafLayout, min_bytes: int) -> _Extension:
    """Leaves a small leaf alone."""
    action = f"ZeRO: {leaf.bytes:,} bytes are below min_bytes={min_bytes:,}"
    return _Extension(leaf.spec, leaf.shard_shape, (action,))


def _extend(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh, axes: Sequence[str]
) -> _Extension:
    """Extends one leaf."""
    shard = shard_shape(shape, spec, mesh)
    if not shape or 0 in shape:
        what = "an empty leaf" if shape else "a scalar"
        return _Extension(spec, shard, (f"ZeRO: {what} stays whole",))
    before = [mesh_axes_of(entry) for entry in spec]
    held = {axis: dim for dim, names in enumerate(before) for axis in names}
    manual = manual_axes(mesh)
    free = [axis for axis in axes if axis not in held and axis not in manual]

    sizes = [mesh.shape[axis] for axis in free]
    placed = best_placement(sizes, shard, [bool(names) for names in before])
    added = [
        tuple(a for a, at in zip(free, placed, strict=True) if at == d) for d in range(len(shape))
    ]
    after = spec_of([*old, *new] for old, new in zip(before, added, strict=True))
    result = shard_shape(shape, after, mesh)
    left = [axis for axis, dim in zip(free, placed, strict=True) if dim is None]
    what = str(shape) if result == shape else f"its shard {result}"
    actions = [
        f"ZeRO: dimension {held[axis]} was over {named_sizes(mesh, [axis])} before"
        for axis in axes
        if axis in held
    ]
    actions += [
        f"ZeRO: dimension {dim} over {named_sizes(mesh, new)}"
        for dim, new in enumerate(added)
        if new
    ]
    notes = [
        f"ZeRO: stays replicated over {named_sizes(mesh, [axis])}: no dimension of {what} divides"
        for axis in left
    ]
    notes += [
        f"ZeRO: cannot use {axis}: it is Manual"
        for axis in axes
        if axis in manual and axis not in held
    ]
    return _Extension(after, result, tuple(actions), tuple(notes))
