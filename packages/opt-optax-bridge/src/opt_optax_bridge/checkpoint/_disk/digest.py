"""A digest of an array's bits that is the same on every mesh.

Every word of an array is mixed with its global index, twice over, and the results are summed
modulo 2**32: two sums are the 64 bits of the digest. A sum has no order, so it does not matter
which device holds which part. At a given index both mixes are bijections of the word, so one
changed word always changes both sums. They are far from linear, so that no pattern of damage, such
as flipped signs or words that changed places, cancels by its own nature: several changed words pass
unseen about once in 2**64. Indices count modulo 2**32. It finds faults, not forgeries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Pair = Any  # two uint32, as a jax or numpy array

_SPREAD, _OTHER = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_MULTIPLIERS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B), np.uint32(0xC2B2AE3D)
_15, _16 = np.uint32(15), np.uint32(16)
_HOST_WORDS = 1 << 15  # Stay in the cache between the operations.


def digest(leaf: Any) -> Pair:
    """Starts the digest of an array, on its devices; does not wait.

    Args:
      leaf: a `jax.Array` of any sharding, dtype and memory kind, no typed key; or a NumPy array,
        whose digest is computed at once.

    Returns:
      The two sums, uint32[2]; replicated where the array is on many devices.
    """
    if not isinstance(leaf, jax.Array):
        return _host_sums(np.asarray(leaf))
    sharding = leaf.sharding
    device: Any = next(iter(sharding.device_set))
    default = device.default_memory().kind
    if sharding.memory_kind not in (None, default):
        leaf = jax.device_put(leaf, sharding.with_memory_kind(default))
    return _device_sums(leaf)


def to_hex(sums: Pair) -> str:
    """Waits for a digest and returns it as 16 hexadecimal digits.

    Examples:
      >>> to_hex(digest(np.arange(3, dtype=np.float32)))
      '192dfcc57519b0b3'
    """
    if isinstance(sums, jax.Array):
        sums = sums.addressable_data(0)
    first, second = np.asarray(sums).tolist()
    return f"{first:08x}{second:08x}"


def digests(leaves: Mapping[str, Any]) -> dict[str, Pair]:
    """Starts the digests of many arrays."""
    return {name: digest(leaf) for name, leaf in leaves.items()}


def _device_sums(leaf: jax.Array) -> jax.Array:
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        sums = cast(jax.Array, _replicated_sums(leaf, everywhere))
        device: Any = next(iter(sharding.device_set))
        if not leaf.is_fully_addressable and device.platform == "cpu":
            # Gloo's collectives of several programs at once may wait for one another for ever.
            sums.block_until_ready()
        return sums
    return cast(jax.Array, _sums(leaf))


def _array_sums(leaf: jax.Array) -> jax.Array:
    words = _words(jnp.atleast_1d(leaf))
    index = _index(words[0].shape) * np.uint32(len(words))
    first = second = None
    for j, word in enumerate(words):
        at = index + np.uint32(j)
        a, b = _mixed(word, at)
        first = a if first is None else first + a
        second = b if second is None else second + b
    zero = np.uint32(0)
    # One reduction with two results reads the array once and writes nothing between.
    sums = lax.reduce(
        (first, second),
        (zero, zero),
        lambda left, right: (left[0] + right[0], left[1] + right[1]),
        tuple(range(words[0].ndim)),
    )
    return jnp.stack(sums)


_sums = jax.jit(_array_sums)


@functools.partial(jax.jit, static_argnums=1)
def _replicated_sums(leaf: jax.Array, everywhere: NamedSharding) -> jax.Array:
    return cast(jax.Array, lax.with_sharding_constraint(_array_sums(leaf), everywhere))


def _mixed(word: Any, index: Any) -> tuple[Any, Any]:
    """Two bijections of a word, chosen by its index; of uint32 arrays, JAX's or NumPy's."""
    spread = index * _SPREAD
    word = word ^ spread ^ (spread >> _15)
    word = (word ^ (word >> _16)) * _MULTIPLIERS[0]
    word = (word ^ (word >> _15)) * _MULTIPLIERS[1]
    word = word ^ (word >> _16)
    other = (word ^ (index * _OTHER)) * _MULTIPLIERS[2]
    return word, other ^ (other >> _15)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """The row-major index of every element modulo 2**32."""
    strides = [np.uint32(math.prod(shape[dim + 1 :]) % 2**32) for dim in range(len(shape))]
    parts = [lax.broadcasted_iota(jnp.uint32, shape, dim) * s for dim, s in enumerate(strides)]
    return functools.reduce(jnp.add, parts)


def _words(leaf: jax.Array) -> list[jax.Array]:
    """The bits of every element as uint32 words, the lowest first."""
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [*_words(lax.real(leaf)), *_words(lax.imag(leaf))]
    if dtype == jnp.bool_:
        return [leaf.astype(jnp.uint32)]
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype).bits
    if bits == 64:
        halves = lax.bitcast_convert_type(leaf, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    return [lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint32)]


def _host_sums(leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    words = _host_words(leaf)
    sums = np.zeros(2, np.uint32)
    for start in range(0, words.size, _HOST_WORDS):
        part = words[start : start + _HOST_WORDS].astype(np.uint32)
        at = (np.arange(start, start + part.size, dtype=np.uint64) % 2**32).astype(np.uint32)
        sums += np.array([mixed.sum(dtype=np.uint32) for mixed in _mixed(part, at)])
    return sums


def _host_words(leaf: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = np.ascontiguousarray(leaf).reshape(-1)
    if flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("<"))
    if flat.dtype == np.bool_:
        return flat.view(np.uint8)
    if jnp.issubdtype(flat.dtype, jnp.integer):
        bits = jnp.iinfo(flat.dtype).bits
    elif jnp.issubdtype(flat.dtype, jnp.complexfloating):
        bits = 32
    else:
        bits = jnp.finfo(flat.dtype).bits
    if bits < 8:  # NumPy keeps one in a byte.
        return flat.view(np.uint8) & np.uint8(2**bits - 1)
    return flat.view(f"uint{min(bits, 32)}")
