"""Values as stored: rounding by integer bits, so that no compiler may take it for a no-op.

XLA on GPUs may delete `x.astype(bfloat16).astype(float32)` (openxla/xla#41605).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_UPPER = np.uint32(0xFFFF0000)
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)
_LARGEST_OF_24 = float(np.uint32(0x7F7FFF00).view(np.float32))
_QUIET = np.uint32(0x00400000)
_GOLDEN = np.uint32(0x9E3779B9)


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of a float32, as uint32."""
    return lax.bitcast_convert_type(x, jnp.uint32)


def float_of(bits: jax.Array) -> jax.Array:
    """The float32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def narrow(x: jax.Array) -> jax.Array:
    """A float32 that a bfloat16 can hold, as that bfloat16; other values are cut off."""
    return lax.bitcast_convert_type((_halved(x) >> 16).astype(jnp.uint16), jnp.bfloat16)


def _halved(x: jax.Array) -> jax.Array:
    """The bits of a float32, those of a NaN such that their upper half is one.

    The lower half alone may make it one (0x7f800001), and what rounding carries into the upper
    half may make it a zero (0x7fffffff, the NaN of GPUs).
    """
    bits = bits_of(x)
    is_nan = bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000)
    return lax.select(is_nan, (bits | _QUIET) & _UPPER, bits)


def widen(x: jax.Array) -> jax.Array:
    """A float of 16 bits or less as the float32 of the same value; anything else as it is."""
    if x.dtype == jnp.bfloat16:
        upper = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return float_of(upper << 16)
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32:
        return x.astype(jnp.float32)
    return x


def round_nearest(x: jax.Array) -> jax.Array:
    """The nearest bfloat16, ties to even, as a float32."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def round_stochastic(x: jax.Array, noise: jax.Array) -> jax.Array:
    """One of the two neighbouring bfloat16s, as a float32; its mean is `x`."""
    has_two = lax.abs(x) < np.float32(_LARGEST)  # a finite value stays finite
    raised = _halved(x) + lax.select(has_two, noise >> 16, jnp.zeros_like(noise))
    return float_of(raised & _UPPER)


def split(master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 as the bfloat16 nearest to it, ties away from zero, and the 16 bits that remain."""
    bits = _halved(master)
    low = bits & np.uint32(0xFFFF)
    visible = ((bits >> 16) + (low >> 15)).astype(jnp.uint16)
    return (
        lax.bitcast_convert_type(visible, jnp.bfloat16),
        lax.bitcast_convert_type(low.astype(jnp.uint16), jnp.int16),
    )


def split_byte(master: jax.Array, noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """A float32 as bfloat16 and 8 more bits; the rest is rounded, by noise or to nearest."""
    has_two = lax.abs(master) < np.float32(_LARGEST_OF_24)  # a finite value stays finite
    raised = jnp.uint32(128) if noise is None else noise >> 24
    bits = _halved(master) + jnp.where(has_two, raised, np.uint32(0))
    visible, low = split(float_of(bits & np.uint32(0xFFFFFF00)))
    byte = lax.bitcast_convert_type(low, jnp.uint16) >> 8
    return visible, lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.int8)


def join(visible: jax.Array, low: jax.Array) -> jax.Array:
    """The float32 that was split, bit by bit as far as they are kept; of a NaN the upper half."""
    width, missing = (jnp.uint8, 8) if low.dtype == jnp.int8 else (jnp.uint16, 0)
    rest = lax.bitcast_convert_type(low, width).astype(jnp.uint32) << missing
    upper = lax.bitcast_convert_type(visible, jnp.uint16).astype(jnp.uint32) - (rest >> 15)
    return float_of((upper << 16) | rest)


def _mix(h: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every bit of the input moves every bit of the output."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def step_seed(seed: int, step: Any) -> jax.Array:
    """What tells the noise of one step from that of others; a scalar."""
    salted = _mix(jnp.uint32(seed % 2**32) + _GOLDEN)
    return _mix(salted ^ jnp.asarray(step).astype(jnp.uint32) * _GOLDEN)


def noise_keys(seeds: jax.Array, names: Sequence[str]) -> jax.Array:
    """What tells the noise of some arrays in a step from each other."""
    digests = np.asarray([zlib.crc32(name.encode()) for name in names], np.uint32)
    return _mix(seeds ^ digests)


def noise_at(key: jax.Array, index: jax.Array) -> jax.Array:
    """32 random bits for each element, by its index in the whole array and by nothing else."""
    return _mix((index * _GOLDEN) ^ key)


def global_index(
    shape: tuple[int, ...], origin: Sequence[Any], strides: Sequence[int]
) -> jax.Array:
    """The index of each element of a part in the whole array, modulo 2**32."""
    along = [jnp.zeros(shape, jnp.uint32)]
    for dim, (start, stride) in enumerate(zip(origin, strides, strict=True)):
        at = lax.broadcasted_iota(jnp.uint32, shape, dim)
        if not (isinstance(start, int | np.integer) and start == 0):
            at = at + jnp.asarray(start).astype(jnp.uint32)
        along.append(at if stride == 1 else at * np.uint32(stride % 2**32))
    return functools.reduce(lax.add, along[1:] or along)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of an array, in elements."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[: len(shape)]
