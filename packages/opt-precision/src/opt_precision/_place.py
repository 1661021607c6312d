"""Where leaves lie: on which devices of a mesh, and in which memory, as far as tracing shows it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from opt_precision.errors import StateError

if TYPE_CHECKING:
    from opt_precision._formats import Format

Space = jax.memory.Space


def is_on_host(array: Any) -> bool:
    """Whether an array lies in the memory of the host, as its type says."""
    return bool(jax.typeof(array).memory_space == Space.Host)


def fetched(array: jax.Array) -> jax.Array:
    """An array on the device."""
    return jax.device_put(array, Space.Device) if is_on_host(array) else array


def placed_like(array: jax.Array, like: jax.Array) -> jax.Array:
    """An array in the memory in which another lies."""
    return jax.device_put(array, Space.Host) if is_on_host(like) else array


def on_host(array: jax.Array) -> jax.Array:
    """A new array of a state in the memory of the host, on the devices on which it lies."""
    is_traced = isinstance(array, jax.core.Tracer)
    place: Any = Space.Host if is_traced else array.sharding.with_memory_kind("pinned_host")
    moved: jax.Array = jax.device_put(array, place)
    return moved


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
    specs = tuple(padded(s.spec, leaf.ndim) for s, leaf in zip(shardings, leaves, strict=True))
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
    return Place(mesh, tuple(padded(s.spec, x.ndim) for s, x in zip(found, leaves, strict=True)))


def padded(spec: PartitionSpec, rank: int) -> PartitionSpec:
    return PartitionSpec(*spec, *[None] * (rank - len(spec)))


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shards(mesh: Any, entry: Any) -> int:
    """How many parts a dimension is cut into."""
    return math.prod(mesh.shape[name] for name in axis_names(entry))


def crossing_format(
    mesh: Any, spec: PartitionSpec, shape: Sequence[int], formats: Sequence[Format]
) -> Format | None:
    """The first format with a block that lies on several devices."""
    for form in formats:
        parts = shards(mesh, spec[form.axis]) if form.block else 1
        if parts > 1 and shape[form.axis] % (parts * form.block):
            return form
    return None


def block_spec(
    mesh: Any, spec: PartitionSpec, shape: Sequence[int], formats: Sequence[Format]
) -> PartitionSpec:
    """Where a leaf lies while it is computed: with every block of it on one device."""
    form = crossing_format(mesh, spec, shape, formats)
    if form is None:
        return spec
    return PartitionSpec(*(None if dim == form.axis else at for dim, at in enumerate(spec)))


def warn_of_crossing_blocks(
    place: Place, leaves: Sequence[tuple[str, tuple[int, ...], list[Format]]]
) -> None:
    """Warns of leaves, by path, shape and formats, that are gathered in every step."""
    lines = []
    for (path, shape, formats), spec in zip(leaves, place.specs, strict=False):
        if (form := crossing_format(place.mesh, spec, shape, formats)) is not None:
            parts = shards(place.mesh, spec[form.axis])
            size = shape[form.axis] // parts
            fitting = next((n for n in range(min(size, 4096), 15, -1) if size % n == 0), None)
            advice = f"give the codec `block={fitting}`" if fitting else "shard another one"
            lines.append(
                f"  {path}: blocks of {form.block} along dimension {form.axis}, which has {size} "
                f"elements on each of {parts} devices: {advice}"
            )
    if lines:
        more = [f"  and {len(lines) - 3} more"] if len(lines) > 3 else []
        warnings.warn(
            "blocks of moments lie on several devices, so every step gathers these parameters, "
            "their gradients and their codes:\n" + "\n".join(lines[:3] + more),
            stacklevel=2,
        )


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


def mapped(function: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """A function of each device's part of arrays."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def explicit_sharding(array: Any) -> Any:
    """The sharding that is part of the type of an array; `None` for axes that no type shows."""
    sharding = jax.typeof(array).sharding
    return sharding if not sharding.mesh.empty and sharding.mesh.explicit_axes else None


def resharded(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array in the places that blocks need; for types that say where it is."""
    lies = explicit_sharding(array)
    if lies is None or lies.spec == spec:
        return array
    moved: jax.Array = jax.sharding.reshard(array, NamedSharding(lies.mesh, spec))
    return moved


def moved_back(new: jax.Array, old: jax.Array, lies: NamedSharding | None) -> jax.Array:
    """A result where its source was: as types say, or else as the layout does."""
    if (typed := explicit_sharding(old)) is not None:
        lies = typed if jax.typeof(new).sharding != typed else None
        return new if lies is None else jax.sharding.reshard(new, lies)
    return new if lies is None else lax.with_sharding_constraint(new, lies)
