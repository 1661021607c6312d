"""Blocks along one axis: an array keeps its shape, and each block of it has one scale.

Blocks never go across rows, so an array that is sharded by rows, or along the axis by whole blocks,
has its scales where its elements are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

SHORTEST: Final = 64
LONGEST: Final = 512


def block_axis(shape: Sequence[int]) -> int:
    """The axis along which blocks lie: the last that is long enough for one, or the longest."""
    long = [axis for axis, size in enumerate(shape) if size >= SHORTEST]
    return long[-1] if long else max(range(len(shape)), key=lambda axis: (shape[axis], axis))


def block_size(size: int, wanted: int) -> int:
    """The size of blocks along an axis: as wanted where that divides it, or else near to it.

    Examples:
      >>> block_size(1024, 256), block_size(768, 256), block_size(1000, 256), block_size(50, 256)
      (256, 256, 500, 50)
    """
    if size % wanted == 0:
        return wanted
    divisors = [n for n in range(SHORTEST, LONGEST + 1) if size % n == 0]
    return divisors[-1] if divisors else min(size, wanted)


def scale_shape(shape: Sequence[int], axis: int, block: int) -> tuple[int, ...]:
    """The shape of the scales."""
    return (*shape[:axis], math.ceil(shape[axis] / block), *shape[axis + 1 :])


def block_max(x: jax.Array, axis: int, block: int) -> jax.Array:
    """The largest element of each block; `x` is non-negative."""
    number = math.ceil(x.shape[axis] / block)
    missing = number * block - x.shape[axis]
    if missing:
        edges = [(0, missing if dim == axis else 0, 0) for dim in range(x.ndim)]
        x = lax.pad(x, jnp.zeros((), x.dtype), edges)
    return _split(x, axis, number, block).max(axis + 1)


def spread(scale: jax.Array, axis: int, block: int, size: int) -> jax.Array:
    """The scale of each element along an axis of `size` elements."""
    number = scale.shape[axis]
    shape = (*scale.shape[:axis], number, block, *scale.shape[axis + 1 :])
    kept = [dim for dim in range(len(shape)) if dim != axis + 1]
    each = lax.broadcast_in_dim(scale, shape, kept)
    whole = each.reshape(*scale.shape[:axis], number * block, *scale.shape[axis + 1 :])
    return whole if whole.shape[axis] == size else lax.slice_in_dim(whole, 0, size, axis=axis)


def _split(x: jax.Array, axis: int, number: int, block: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], number, block, *x.shape[axis + 1 :])
