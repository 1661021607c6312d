"""Whole matrices out of the parts that devices hold, and back: what runs inside of `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from opt_matrix._groups import Group, is_summed, size, turned_axes


def on_whole_matrices(
    fn: Callable[[jax.Array], Any], group: Group, mesh: Mapping[str, int], blocks: jax.Array
) -> tuple[jax.Array, Any]:
    """Returns what `fn` makes of a group's matrices, in the parts of this device; and its state."""
    # `blocks` are this device's parts, `[matrices, *part of each]`. The stack of them is padded; of
    # axes that replicate it each device takes its piece; one all-to-all over all shared axes brings
    # the parts of a piece together; one all-gather those of the axes that are gathered. Back it is
    # the same in the other direction.
    kind, way, local = group.kind, group.way, blocks.shape[1:]
    replicating = tuple(axis for axis in way.share if axis not in kind.matrix_axes)
    shared = tuple(axis for axis in way.share if axis in kind.matrix_axes)
    replicas, workers, gathered = (size(mesh, axes) for axes in (replicating, shared, way.gather))
    here = (group.count + group.padding) // (replicas * workers)

    x = jnp.pad(blocks, [(0, group.padding)] + [(0, 0)] * len(local))
    if replicating:
        x = x.reshape(replicas, workers * here, *local)
        x = lax.dynamic_index_in_dim(x, lax.axis_index(replicating), keepdims=False)
    x = x.reshape(workers, here, *local)
    if shared:
        x = _moved(lax.all_to_all, x, shared, 0, 0)
    if way.gather:
        x = _moved(lax.all_gather, x, way.gather)
    # Each axis that came in goes before the dimension that it had cut.
    came = (*way.gather, *shared)
    order = [len(came)]
    for dim, axes in enumerate(kind.matrix_spec):
        order += [came.index(axis) for axis in axes if axis in came]
        order.append(len(came) + 1 + dim)
    merged = x.reshape(*(mesh[axis] for axis in came), here, *local).transpose(order)
    ends = [place for place, dim in enumerate(order) if dim > len(came)]
    rows = math.prod(merged.shape[1 : ends[kind.num_rows - 1] + 1])
    result, state = fn(merged.reshape(here, rows, -1))

    y = result.reshape(merged.shape).transpose(np.argsort(order))
    # One array, not one computation for each of the parts that are sent.
    y = lax.optimization_barrier(y.reshape(gathered, workers, -1))
    # Every device along the gathered axes has computed the same; each takes its part.
    index = lax.axis_index(way.gather) if way.gather else 0
    y = lax.dynamic_index_in_dim(y, index, keepdims=False)
    if shared:
        y = _moved(lax.all_to_all, y, shared, 0, 0)
    y = y.reshape(workers * here, *local)
    if replicating and is_summed(group.count, group.padding):
        wide = jnp.promote_types(y.dtype, jnp.float32)
        stack = jnp.zeros((replicas * workers * here, *local), wide)
        first = lax.axis_index(replicating) * workers * here
        stack = lax.dynamic_update_slice_in_dim(stack, y.astype(wide), first, 0)
        y = lax.psum(stack[: group.count], replicating).astype(y.dtype)
    elif replicating:
        y = _moved(lax.all_gather, y, replicating, tiled=True)
    return y[: group.count], state


def split(fn: Any, group: Group, x: jax.Array) -> jax.Array:
    """What `fn` makes of matrices that stay cut over the split axes."""
    kind, way = group.kind, group.way
    turned = turned_axes(kind, way)
    small, large = (1, 2) if kind.fan_in <= kind.fan_out else (2, 1)
    if turned:
        x = _moved(lax.all_to_all, x, turned, large, small, tiled=True)
    x = fn.split(x, way.split, kind.fan_in, kind.fan_out)
    if turned:
        x = _moved(lax.all_to_all, x, turned, small, large, tiled=True)
    return x


def _moved(move: Callable[..., Any], x: jax.Array, *to: Any, **options: Any) -> Any:
    """What a collective makes of an array; of its bits where its dtype is narrow."""
    # XLA's CPU compiler turns bfloat16 into float32 around a collective, and twice the bytes move.
    if x.dtype.itemsize != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return move(x, *to, **options)
    bits = move(lax.bitcast_convert_type(x, jnp.uint16), *to, **options)
    return lax.bitcast_convert_type(bits, x.dtype)


def place_like(leaf: jax.Array, like: jax.Array) -> Any:
    """The leaf with the sharding of another, where types have one."""
    return placed(leaf, jax.typeof(like).sharding.spec)


def placed(leaf: Any, spec: PartitionSpec) -> Any:
    """The leaf with a layout, where its type says that it lies otherwise."""
    sharding = jax.typeof(leaf).sharding
    mesh = sharding.mesh
    # Of Auto axes types say nothing, and nothing can be placed over them.
    if mesh.empty or not mesh.explicit_axes or (mesh.auto_axes and any(spec)):
        return leaf
    return leaf if sharding.spec == spec else jax.sharding.reshard(leaf, NamedSharding(mesh, spec))
