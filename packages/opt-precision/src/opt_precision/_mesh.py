"""Where a leaf lies, as far as that can be known while a step is traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from opt_precision._formats import Format
from opt_precision.errors import StateError


class Place(NamedTuple):
    """Where the leaves of a tree of parameters lie."""

    mesh: Any = None  # the mesh; `None` for one device, or where it cannot be known
    # Per leaf the mesh axes of each dimension; empty without a mesh.
    specs: tuple[PartitionSpec, ...] = ()
    is_hidden: bool = False  # whether leaves lie over devices in a way that tracing does not show


def find_place(layout: Any, leaves: Sequence[Any]) -> Place:
    """Returns where parameters lie: as a layout says, or as their types do."""
    if layout is not None:
        return _from_layout(layout, leaves)
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    meshes = {sharding.mesh for sharding in shardings if not sharding.mesh.empty}
    if not meshes:
        return Place()
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    if kinds == {AxisType.Manual}:
        return Place()  # parts of arrays, in a `shard_map` of the user's
    if len(meshes) > 1 or kinds != {AxisType.Explicit}:
        return Place(is_hidden=any(mesh.size > 1 for mesh in meshes))
    specs = tuple(_padded(s.spec, leaf.ndim) for s, leaf in zip(shardings, leaves, strict=True))
    return Place(meshes.pop(), specs)


def _from_layout(layout: Any, leaves: Sequence[Any]) -> Place:
    found = jax.tree.leaves(getattr(layout, "shardings", layout))
    if len(found) != len(leaves) or not all(isinstance(s, NamedSharding) for s in found):
        raise StateError(
            f"`layout` must have a NamedSharding for each of the {len(leaves)} parameters; found "
            f"{len(found)} leaves of {sorted({type(s).__name__ for s in found})}"
        )
    meshes = {sharding.mesh for sharding in found}
    if len(meshes) > 1:
        raise StateError(f"`layout` must be on one mesh; found {len(meshes)}")
    mesh = meshes.pop() if meshes else None
    if mesh is None or mesh.size == 1:
        return Place()
    return Place(mesh, tuple(_padded(s.spec, x.ndim) for s, x in zip(found, leaves, strict=True)))


def _padded(spec: PartitionSpec, rank: int) -> PartitionSpec:
    return PartitionSpec(*spec, *[None] * (rank - len(spec)))


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shards(mesh: Any, entry: Any) -> int:
    """How many parts a dimension is cut into."""
    return math.prod(mesh.shape[name] for name in axis_names(entry))


def aligned(mesh: Any, spec: PartitionSpec, shape: Sequence[int], axis: int, block: int) -> bool:
    """Whether no block along an axis lies on two devices."""
    number = shards(mesh, spec[axis])
    return number == 1 or shape[axis] % (number * block) == 0


def without(spec: PartitionSpec, axis: int) -> PartitionSpec:
    """A spec with one dimension whole on every device."""
    return PartitionSpec(*(None if dim == axis else entry for dim, entry in enumerate(spec)))


def local_origin(mesh: Any, spec: PartitionSpec, local: Sequence[int]) -> tuple[Any, ...]:
    """Where this device's part begins; inside of `shard_map`."""
    origin: list[Any] = []
    for entry, size in zip(spec, local, strict=True):
        index: Any = 0
        for name in axis_names(entry):
            index = index * mesh.shape[name] + jax.lax.axis_index(name)
        origin.append(index * size)
    return tuple(origin)


def part_shape(mesh: Any, spec: PartitionSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of each device's part."""
    return tuple(size // shards(mesh, entry) for size, entry in zip(shape, spec, strict=True))


def spec_of(
    place: Place, at: int, shape: Sequence[int], formats: Sequence[Format]
) -> PartitionSpec:
    """Where a leaf lies while it is computed: every block of it on one device."""
    spec = place.specs[at]
    for form in formats:
        if form.block and not aligned(place.mesh, spec, shape, form.axis, form.block):
            return without(spec, form.axis)
    return spec


def mapped(function: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """A function of each device's part of arrays."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def inside(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which a function of one device's part is traced."""
    if mesh is None:
        return contextlib.nullcontext()
    kinds = dict.fromkeys(mesh.axis_names, AxisType.Manual)
    abstract: Any = mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh
    made: Any = jax.sharding.use_abstract_mesh(abstract.update_axis_types(kinds))
    return made  # type: ignore[no-any-return]


def resharded(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array in the places that blocks need; for types that say where it is."""
    sharding = jax.typeof(array).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes or sharding.spec == spec:
        return array
    moved: jax.Array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))
    return moved


def moved_back(new: jax.Array, old: jax.Array, lies: NamedSharding | None) -> jax.Array:
    """A result where its source was: as types say, or else as the layout does."""
    sharding = jax.typeof(old).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        made: jax.Array = new if lies is None else lax.with_sharding_constraint(new, lies)
        return made
    if jax.typeof(new).sharding == sharding:
        return new
    moved: jax.Array = jax.sharding.reshard(new, sharding)
    return moved
