"""Whole matrices out of the parts that devices hold, and back: what runs inside of `shard_map`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from opt_matrix import _costs
from opt_matrix._layouts import Axes
from opt_matrix._plan import Group


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The way of one group's matrices, on one device.

    A stack of parts is padded; of axes that replicate it each device takes its piece; one
    all-to-all over all shared axes brings the parts of a piece together; one all-gather those of
    the axes that are gathered. Back it is the same in the other direction; what axes that replicate
    had shared out is gathered, or summed where most of the stack is padding.
    """

    group: Group
    mesh: Mapping[str, int]

    def run(self, fn: Callable[[jax.Array], Any], blocks: jax.Array) -> tuple[jax.Array, Any]:
        """What `fn` makes of `[matrices, *part of each]`, in such parts, and what else it does."""
        stack, inverse = self._hand_out(blocks)
        result, others = fn(stack)
        return inverse(result), others

    def _hand_out(self, blocks: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Returns the matrices of this device, and the function that brings them back."""
        group, way = self.group, self.group.way
        local = blocks.shape[1:]
        replicating = tuple(axis for axis in way.share if axis not in group.kind.matrix_axes)
        shared = tuple(axis for axis in way.share if axis in group.kind.matrix_axes)
        replicas, workers = _costs.size(self.mesh, replicating), _costs.size(self.mesh, shared)
        here = (group.count + group.padding) // (replicas * workers)
        gathered = _costs.size(self.mesh, way.gather)
        sizes = [self.mesh[axis] for axis in (*way.gather, *shared)]

        x = jnp.pad(blocks, [(0, group.padding)] + [(0, 0)] * len(local))
        if replicating:
            x = x.reshape(replicas, workers * here, *local)
            x = lax.dynamic_index_in_dim(x, lax.axis_index(replicating), keepdims=False)
        x = x.reshape(workers, here, *local)
        if shared:
            x = _bits(lambda x: lax.all_to_all(x, shared, 0, 0), x)
        if way.gather:
            x = _bits(lambda x: lax.all_gather(x, way.gather), x)
        order = self._order((*way.gather, *shared))
        expanded = x.reshape(*sizes, here, *local)
        merged = expanded.transpose(order)
        rows = math.prod(self._whole(range(group.kind.num_rows), local))
        columns = math.prod(self._whole(range(group.kind.num_rows, len(local)), local))

        def inverse(y: jax.Array) -> jax.Array:
            y = y.reshape(merged.shape).transpose(_inverted(order))
            # One array, not one computation for each of the parts that are sent.
            y = lax.optimization_barrier(y.reshape(gathered, workers, -1))
            # Every device along the gathered axes has computed the same; each takes its part.
            index = lax.axis_index(way.gather) if way.gather else 0
            y = lax.dynamic_index_in_dim(y, index, keepdims=False)
            if shared:
                y = _bits(lambda y: lax.all_to_all(y, shared, 0, 0), y)
            y = y.reshape(workers * here, *local)
            if replicating and _costs.is_summed(group.count, group.padding):
                wide = jnp.promote_types(y.dtype, jnp.float32)
                stack = jnp.zeros((replicas * workers * here, *local), wide)
                first = lax.axis_index(replicating) * workers * here
                stack = lax.dynamic_update_slice_in_dim(stack, y.astype(wide), first, 0)
                total: jax.Array = lax.psum(stack[: group.count], replicating)
                return total.astype(y.dtype)
            if replicating:
                y = _bits(lambda y: lax.all_gather(y, replicating, tiled=True), y)
            return y[: group.count]

        return merged.reshape(here, rows, columns), inverse

    def _order(self, leading: Axes) -> tuple[int, ...]:
        """The permutation that puts each axis that came in before the dimension it had cut."""
        order = [len(leading)]
        for dim, axes in enumerate(self.group.kind.matrix_spec):
            order += [leading.index(axis) for axis in axes if axis in leading]
            order.append(len(leading) + 1 + dim)
        return tuple(order)

    def _whole(self, dims: range, local: tuple[int, ...]) -> list[int]:
        """The sizes of dimensions once all that is handed out or gathered has come in."""
        kept = {*self.group.way.share, *self.group.way.gather}
        spec = self.group.kind.matrix_spec
        return [
            local[dim] * _costs.size(self.mesh, tuple(axis for axis in spec[dim] if axis in kept))
            for dim in dims
        ]


def split(fn: Any, group: Group, x: jax.Array) -> jax.Array:
    """What `fn` makes of matrices that stay cut over the split axes."""
    kind, way = group.kind, group.way
    turned = _costs.turned_axes(kind, way)
    small, large = (1, 2) if kind.fan_in <= kind.fan_out else (2, 1)
    if turned:
        x = _bits(lambda x: lax.all_to_all(x, turned, large, small, tiled=True), x)
    x = fn.split(x, way.split, kind.fan_in, kind.fan_out)
    if turned:
        x = _bits(lambda x: lax.all_to_all(x, turned, small, large, tiled=True), x)
    return x


def _inverted(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Moves an array as bits where its dtype is narrow."""
    # XLA's CPU compiler turns bfloat16 into float32 around a collective, and twice the bytes move.
    if x.dtype.itemsize != 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)
