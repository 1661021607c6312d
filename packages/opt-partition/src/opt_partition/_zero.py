"""ZeRO: sharding of states over mesh axes that their parameters do not use."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.sharding import PartitionSpec

from opt_partition._display import human_bytes
from opt_partition._layout import Layout, LeafLayout
from opt_partition._specs import (
    AnyMesh,
    manual_axes,
    mesh_axes_of,
    named_sizes,
    shard_shape,
    spec_of,
)
from opt_partition.errors import AxesError, IndivisibleError, ReplicatedWarning

_TOLERATED: Final = 0.01  # of the bytes on a device


def extend_over(
    specs: Any,
    shapes: Any,
    mesh: AnyMesh,
    axes: str | Sequence[str],
    *,
    min_bytes: int = 0,
    strict: bool = False,
) -> Layout:
    """Shards every leaf further over the given mesh axes, as far as it is divisible.

    Applied to the state only, this is ZeRO-1; if gradients are constrained to the same specs,
    ZeRO-2. One mesh axis after the other, the largest first, goes to the longest dimension of the
    shard that it divides: to one that got an axis already, so that a single collective gathers the
    leaf; else to one that was not sharded before, so that shards do not become too thin. Of equally
    long ones the first is taken, whose shards are contiguous.

    New mesh axes are added after (minor to) the existing ones of a dimension, so that gathering
    over them restores exactly the shards of `specs`, i.e. those of the parameters.

    Args:
      specs: per leaf a `PartitionSpec` of mesh axes, a `NamedSharding`, whose memory kind is kept,
        or `None` for a replicated leaf; or a `Layout`, whose notes and memory kinds are kept.
      shapes: a tree with the structure of `specs`, of arrays or `jax.ShapeDtypeStruct`s.
      mesh: a `Mesh` or `AbstractMesh`.
      axes: one or more mesh axes; those already used by a leaf and `Manual` ones are skipped.
      min_bytes: leaves with fewer global bytes are not changed.
      strict: whether to raise an error instead of warning that leaves stay replicated.

    Returns:
      The layout. The `actions` of a leaf list the dimensions sharded, or why nothing was necessary:
      the axis was already used, or the leaf is a scalar, empty or below `min_bytes`. Its `notes`
      list the mesh axes over which it stays replicated, and why.

    Warns:
      ReplicatedWarning: `axes` have one device, or leaves stay replicated over them because no
        dimension is divisible. Scalars, leaves with fewer elements than devices and leaves below
        `min_bytes` do not count, nor does what is at most 1 % of the bytes on a device.

    Raises:
      AxesError: `specs`, `shapes`, `mesh` and `axes` do not match; or, if `strict`, `axes` have
        one device.
      IndivisibleError: leaves stay replicated, and `strict`.

    References:
      Rajbhandari, Rasley, Ruwase and He,
      `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models`, 2020,
      https://arxiv.org/abs/1910.02054.

    Examples:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> layout = extend_over(
      ...     {'mu': P(None, 'model'), 'count': P(), 'odd': P()},
      ...     {'mu': jax.ShapeDtypeStruct((16, 6), 'float32'),
      ...      'count': jax.ShapeDtypeStruct((), 'int32'),
      ...      'odd': jax.ShapeDtypeStruct((7,), 'float32')},
      ...     AbstractMesh((8, 2), ('data', 'model')),
      ...     'data',
      ... )
      >>> [(leaf.path, tuple(leaf.spec), leaf.actions) for leaf in layout.rows]
      [('count', (), ('ZeRO: a scalar is not sharded',)),
       ('mu', ('data', 'model'), ('ZeRO: dimension 0 over data=8',)),
       ('odd', (None,), ())]
      >>> layout.notes
      ('odd: ZeRO: stays replicated over data=8: no dimension of (7,) is divisible',)
    """
    layout = extended(Layout.from_specs(specs, shapes, mesh), axes, min_bytes)
    report_replicated([layout], axes, min_bytes, strict=strict)
    return layout


def extended(layout: Layout, axes: str | Sequence[str], min_bytes: int) -> Layout:
    """Returns a layout extended as by `extend_over`, without a warning."""
    names = distinct_axes("axes", axes, layout.mesh)
    if min_bytes < 0:
        raise ValueError(f"`min_bytes` must be non-negative; got {min_bytes}")
    place = functools.cache(functools.partial(_extend, mesh=layout.mesh, axes=names))

    def extend(leaf: LeafLayout) -> LeafLayout:
        if leaf.bytes < min_bytes:
            why = f"ZeRO: {leaf.bytes:,} bytes are below min_bytes={min_bytes:,}"
            to = _Extension(leaf.spec, leaf.shard_shape, (why,))
        else:
            to = place(leaf.spec, leaf.shape)
        return dataclasses.replace(
            leaf,
            spec=to.spec,
            shard_shape=to.shard_shape,
            notes=tuple(dict.fromkeys((*leaf.notes, *to.notes))),
            actions=tuple(dict.fromkeys((*leaf.actions, *to.actions))),
        )

    return Layout(layout.mesh, jax.tree.map(extend, layout.leaves))


def report_replicated(
    layouts: Sequence[Layout],
    axes: str | Sequence[str],
    min_bytes: int,
    *,
    strict: bool = False,
    beside: int = 0,
) -> None:
    """Warns once of what `extended` layouts leave replicated, of these bytes and those `beside`."""
    mesh = layouts[0].mesh
    names = [axis for axis in distinct_axes("axes", axes, mesh) if axis not in manual_axes(mesh)]
    where = f"ZeRO over {named_sizes(mesh, names)}"
    leaves = [leaf for layout in layouts for leaf in layout.rows]
    counted = [leaf for leaf in leaves if leaf.shape and leaf.bytes >= max(1, min_bytes)]
    if not names or not counted:
        return
    error: type[Exception] = AxesError
    if math.prod(mesh.shape[axis] for axis in names) == 1:
        held = sum(leaf.bytes_per_device for leaf in counted)
        message = (
            f"{where} has no effect: {human_bytes(held)} stay on each device; name mesh axes with "
            "more than one device"
        )
    else:
        error = IndivisibleError
        waste = ((leaf, _waste(leaf, names, mesh)) for leaf in counted)
        worst = sorted((kept for kept in waste if kept[1]), key=lambda kept: -kept[1])
        total = sum(count for _, count in worst)
        if total <= _TOLERATED * (beside + sum(leaf.bytes_per_device for leaf in leaves)):
            return
        message = (
            f"{where} leaves {len(worst)} of {len(leaves)} leaves replicated, "
            f"{human_bytes(total)} per device beyond an equal share, as no dimension of their "
            f"shards is divisible: "
            f"{', '.join(f'{leaf.path} {leaf.shard_shape}' for leaf, _ in worst[:3])}"
            f"{', ...' * (len(worst) > 3)}; pad these dimensions or name other mesh axes"
        )
    if strict:
        raise error(message)
    warnings.warn(message, ReplicatedWarning, stacklevel=3)


def _waste(leaf: LeafLayout, axes: Sequence[str], mesh: AnyMesh) -> int:
    """Returns the bytes that a device holds beyond an equal share over the axes not used."""
    used = {axis for entry in leaf.spec for axis in mesh_axes_of(entry)}
    ways = math.prod(mesh.shape[axis] for axis in axes if axis not in used)
    held = leaf.bytes_per_device
    return held - -(-held // ways) if math.prod(leaf.shard_shape) >= ways else 0


class _Extension(NamedTuple):
    """The extension of one shape with one spec."""

    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    actions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def distinct_axes(argument: str, axes: str | Sequence[str], mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the mesh axes to shard over; checks that they are distinct axes of `mesh`."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if not names or not mesh.shape.keys() >= {*names} or len({*names}) < len(names):
        raise AxesError(
            f"`{argument}` must be distinct mesh axes: the mesh has "
            f"{named_sizes(mesh, mesh.axis_names)}; found {axes!r}"
        )
    return names


def _extend(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh, axes: Sequence[str]
) -> _Extension:
    """Extends one leaf."""
    shard = shard_shape(shape, spec, mesh)
    if not shape or 0 in shape:
        what = "an empty leaf" if shape else "a scalar"
        return _Extension(spec, shard, (f"ZeRO: {what} is not sharded",))
    before = [mesh_axes_of(entry) for entry in spec]
    held = {axis: dim for dim, names in enumerate(before) for axis in names}
    manual = manual_axes(mesh)
    free = [axis for axis in axes if axis not in held and axis not in manual]

    places: dict[str, int] = {}
    lengths = list(shard)
    for axis in sorted(free, key=lambda axis: -mesh.shape[axis]):
        size = mesh.shape[axis]
        fitting = [dim for dim, length in enumerate(lengths) if length % size == 0]
        if fitting:
            again = [dim for dim in fitting if dim in places.values()]
            place = min(again or fitting, key=lambda dim: (bool(before[dim]), -lengths[dim]))
            places[axis], lengths[place] = place, lengths[place] // size
    added = [[axis for axis in free if places.get(axis) == dim] for dim in range(len(shape))]
    after = spec_of([*old, *new] for old, new in zip(before, added, strict=True))
    result = shard_shape(shape, after, mesh)
    left = [axis for axis in free if axis not in places]
    what = str(shape) if result == shape else f"its shard {result}"
    actions = [
        f"ZeRO: dimension {held[axis]} was already over {named_sizes(mesh, [axis])}"
        for axis in axes
        if axis in held
    ]
    actions += [
        f"ZeRO: dimension {dim} over {named_sizes(mesh, new)}"
        for dim, new in enumerate(added)
        if new
    ]
    notes = [
        f"ZeRO: stays replicated over {named_sizes(mesh, [axis])}: no dimension of {what} is "
        "divisible"
        for axis in left
    ]
    notes += [
        f"ZeRO: cannot use {axis}: it is Manual"
        for axis in axes
        if axis in manual and axis not in held
    ]
    return _Extension(after, result, tuple(actions), tuple(notes))
