"""One reduction over the devices for a whole batch, whatever the number of microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from opt_accumulate._batch import batch_rows, has_rows
from opt_accumulate._loop import Further, Loop, Stacks, Sums, accumulate
from opt_accumulate._placement import (
    axes_of,
    explicit_axes,
    explicit_spec,
    place,
    without,
)
from opt_accumulate._trees import described
from opt_accumulate.errors import OptionError


def find_mesh(mesh: Any, shardings: Any, data_axes: Sequence[str]) -> Any:
    """Returns the mesh to reduce over: that given, that of the shardings, or the current one."""
    meshes = [sharding.mesh for sharding in jax.tree.leaves(shardings)]
    current = jax.sharding.get_abstract_mesh()
    types = dict(zip(current.axis_names, current.axis_types, strict=True))
    manual = [axis for axis in data_axes if types.get(axis) == AxisType.Manual]
    if manual:
        raise OptionError(
            f"`reduce='deferred'` inside a `jax.shard_map` over {', '.join(map(repr, manual))}: "
            "each device has its own rows there already. Take `reduce='auto'`, which sums once."
        )
    found = mesh or next(iter(meshes), None) or (None if current.empty else current)
    if found is None:
        raise OptionError(
            "`reduce='deferred'` needs a mesh: give `mesh`, or call under `jax.set_mesh(mesh)`."
        )
    others = [other for other in meshes if dict(other.shape) != dict(found.shape)]
    if others:
        raise OptionError(
            f"`out_shardings` lie on a mesh of {dict(others[0].shape)}, `mesh` is "
            f"{dict(found.shape)}: they must be one mesh."
        )
    check_axes(found, data_axes)
    return found


def check_axes(mesh: Any, data_axes: Sequence[str]) -> None:
    """Raises an `OptionError` unless a mesh has the axes."""
    missing = [axis for axis in data_axes if axis not in mesh.axis_names]
    if missing:
        raise OptionError(
            f"`data_axes` names {', '.join(map(repr, missing))}, but the mesh has the axes "
            f"{', '.join(map(repr, mesh.axis_names))}. Name those that the batch is sharded over."
        )


def accumulate_deferred(
    loop: Loop,
    mesh: Any,
    data_axes: tuple[str, ...],
    shardings: Any,
    rng: Any,
    params: Any,
    batch: Any,
    further: Further,
) -> tuple[Sums, Stacks]:
    """Does what `accumulate` does, over all devices, and adds up over them once."""
    _check_rows(batch, data_axes)
    devices = math.prod(mesh.shape[axis] for axis in data_axes)
    split = loop.sizes.of(batch_rows(batch), devices)
    over_devices = PartitionSpec(data_axes)

    leaves, treedef = jax.tree.flatten((batch, further))
    of_batch = len(jax.tree.leaves(batch))
    # By position; functions, strings and Python's numbers stay what they are.
    arrays, specs = dict[int, Any](), dict[int, Any]()
    for i, leaf in enumerate(leaves):
        if i < of_batch and has_rows(leaf):
            arrays[i], specs[i] = _spread(leaf, mesh, data_axes), over_devices
        elif isinstance(leaf, jax.Array | np.ndarray):
            arrays[i], specs[i] = _gathered(leaf, data_axes), PartitionSpec()

    def on_device(
        index: jax.Array, params: Any, arrays: dict[int, Any], rng: Any
    ) -> tuple[Sums, Stacks]:
        on_shard = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        batch, further = jax.tree.unflatten(treedef, on_shard)

        def keep_place(tree: Any) -> Any:
            return place(tree, shardings, data_axes)

        sums, stacks = accumulate(loop, split, index[0], rng, params, batch, further, keep_place)
        return jax.tree.map(lambda leaf: leaf[None], sums), stacks

    # Results are stacked over the devices, not summed inside: there, `psum_scatter` gathers what
    # lies over a tensor axis, and `psum` fails on Explicit meshes of more axes (jax 0.8 to 0.12).
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(over_devices, PartitionSpec(), specs, PartitionSpec()),
        out_specs=(over_devices, over_devices),
        axis_names=set(data_axes),
        # Loss functions have loops that begin with constants; as types these would have to be
        # marked as varying over the devices, in each of them.
        check_vma=False,
    )
    index = _spread(jnp.arange(devices, dtype=jnp.int32), mesh, data_axes)
    params = jax.tree.map(lambda leaf: _gathered(leaf, data_axes), params)
    # Outside of `jit`, `shard_map` over some axes of a mesh only is not to be had.
    sums, stacks = jax.jit(run)(index, params, arrays, rng)

    def reduced(leaf: jax.Array, sharding: NamedSharding | None) -> jax.Array:
        return _reduce(leaf, sharding, mesh, data_axes)

    grads = jax.tree.map(reduced, sums.grads, shardings)
    return jax.tree.map(_sum_devices, sums._replace(grads=None))._replace(grads=grads), stacks


def _check_rows(batch: Any, data_axes: tuple[str, ...]) -> None:
    def other_axes(leaf: Any) -> str:
        spec = explicit_spec(leaf) if has_rows(leaf) else None
        axes = axes_of(spec[0]) if spec else ()
        return "" if set(axes) <= set(data_axes) else ", ".join(map(repr, axes))

    if wrong := described(batch, other_axes):
        raise OptionError(
            f"`data_axes` has {', '.join(map(repr, data_axes))}, but rows of `batch` lie over "
            "other mesh axes too:\n" + "\n".join(wrong) + "\nName all axes that the rows lie over."
        )


def _gathered(leaf: Any, data_axes: tuple[str, ...]) -> Any:
    spec = explicit_spec(leaf)
    if spec is None or without(spec, data_axes) == spec:
        return leaf
    return jax.sharding.reshard(leaf, without(spec, data_axes))


def _spread(leaf: Any, mesh: Any, data_axes: tuple[str, ...]) -> Any:
    spec = explicit_spec(leaf)
    if spec is None:
        return leaf
    explicit = explicit_axes(mesh)
    rows = tuple(axis for axis in data_axes if axis in explicit)
    rest = tuple(without(spec, data_axes))[1:]
    return jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(rows or None, *rest)))


def _sum_devices(stacked: jax.Array) -> jax.Array:
    total: jax.Array = jnp.sum(stacked, 0, dtype=stacked.dtype)
    return total


def _reduce(
    stacked: jax.Array, sharding: NamedSharding | None, mesh: Any, data_axes: tuple[str, ...]
) -> jax.Array:
    if sharding is None:
        return _sum_devices(stacked)
    spec = sharding.spec
    scattered = _scattered_axes(spec, stacked.shape[1:], mesh, data_axes)
    if not scattered:
        return jnp.asarray(place(_sum_devices(stacked), sharding))

    def scatter(local: jax.Array) -> jax.Array:
        total = local[0]
        for dim, axes in scattered.items():
            total = jax.lax.psum_scatter(total, axes, scatter_dimension=dim, tiled=True)
        used = {axis for axes in scattered.values() for axis in axes}
        remaining = tuple(axis for axis in data_axes if axis not in used)
        return jax.lax.psum(total, remaining) if remaining else total

    in_spec = PartitionSpec(data_axes, *tuple(without(spec, data_axes)))
    stacked = place(stacked, NamedSharding(mesh, in_spec))
    run = jax.shard_map(scatter, mesh=mesh, in_specs=in_spec, out_specs=spec, check_vma=False)
    reduced: jax.Array = run(stacked)
    return reduced


def _scattered_axes(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: Any, data_axes: tuple[str, ...]
) -> dict[int, tuple[str, ...]]:
    """Returns the data axes of each dimension; none where the parts would come out in disorder."""
    scattered = {}
    for dim, entry in enumerate(spec):
        axes = axes_of(entry)
        data = tuple(axis for axis in axes if axis in data_axes)
        if not data:
            continue
        if axes[-len(data) :] != data or shape[dim] % math.prod(mesh.shape[a] for a in axes):
            return {}
        scattered[dim] = data
    return scattered
