"""A digest of an array's bits that is the same on every mesh.

Every word of an array is mixed with its global index, twice over, and the results are summed
modulo 2**32: two sums are the 64 bits of the digest. A sum has no order, so it does not matter
which device holds which part. At a given index both mixes are bijections of the word, so one
changed word always changes both sums. They are far from linear, so that no pattern of damage, such
as flipped signs or words that changed places, cancels by its own nature: several changed words pass
unseen about once in 2**64. Indices count modulo 2**32. It finds faults, not forgeries.

Devices do not communicate. Each sums the shard that it has, every distinct part of the array on
one device only; the host adds these sums, and those of other processes in one exchange (`add_up`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from opt_checkpoint._disk.pacing import paced

Pair = np.ndarray[Any, Any]  # uint32[2]

_SPREAD, _OTHER = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_MULTIPLIERS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B), np.uint32(0xC2B2AE3D)
_15, _16 = np.uint32(15), np.uint32(16)
_HOST_WORDS = 1 << 15  # Stay in the cache between the operations.


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums over the parts of an array that this process answers for, being computed.

    Attributes:
      parts: uint32[parts, 2].
      is_whole: whether they are all; otherwise, other processes have parts of the same array.
    """

    parts: Any
    is_whole: bool = True

    def total(self) -> Pair:
        """Waits, and adds the parts."""
        total: Pair = np.asarray(self.parts).sum(axis=0, dtype=np.uint32)
        return total


def digest(leaf: Any) -> Sums:
    """Starts the digest of an array, on its devices; waits only where it must (`paced`).

    Args:
      leaf: a `jax.Array` of any sharding, dtype and memory kind, no typed key; or a NumPy array,
        whose digest is computed at once.

    Returns:
      The sums, which stay right when `leaf` is donated afterwards.
    """
    if not isinstance(leaf, jax.Array):
        return Sums(_host_sums(np.asarray(leaf))[None])
    sharding = leaf.sharding
    device: Any = next(iter(sharding.device_set))
    default = device.default_memory().kind
    if sharding.memory_kind not in (None, default):
        leaf = jax.device_put(leaf, sharding.with_memory_kind(default))
    return Sums(_device_sums(leaf), leaf.is_fully_addressable)


def digests(leaves: Mapping[str, Any]) -> dict[str, Sums]:
    """Starts the digests of many arrays."""
    return {name: digest(leaf) for name, leaf in leaves.items()}


def add_up(sums: Mapping[str, Sums]) -> dict[str, Sums]:
    """Waits for digests and adds what other processes have of the same arrays.

    Where every array is whole here, nothing is exchanged. Otherwise all processes must call it with
    the same names, while none of their programs that communicate is running.

    Args:
      sums: digests by name.

    Returns:
      The same, all whole.
    """
    partial = [name for name, part in sums.items() if not part.is_whole]
    if not partial:
        return dict(sums)
    mine = np.stack([sums[name].total() for name in partial])
    every = np.asarray(multihost_utils.process_allgather(mine))
    totals = every.sum(axis=0, dtype=np.uint32)
    return {**sums, **{name: Sums(totals[i : i + 1]) for i, name in enumerate(partial)}}


def to_hex(sums: Sums) -> str:
    """Waits for a digest and returns it as 16 hexadecimal digits.

    Examples:
      >>> to_hex(digest(np.arange(3, dtype=np.float32)))
      '192dfcc57519b0b3'

    Raises:
      ValueError: parts of it are with other processes; see `add_up`.
    """
    if not sums.is_whole:
        raise ValueError("`sums`: other processes have parts of them: call `add_up` before")
    first, second = sums.total().tolist()
    return f"{first:08x}{second:08x}"


def _device_sums(leaf: jax.Array) -> Any:
    """The sums of the distinct shards that this process answers for, uint32[shards, 2]."""
    # Of all devices that hold the same part, in whatever process, one has the replica 0.
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    if not shards or not leaf.size:
        return np.zeros((1, 2), np.uint32)
    strides = _strides(leaf.shape)
    places = np.array([_place(shard.index, leaf.shape, strides) for shard in shards], np.uint32)
    if len(shards) == 1:
        return _sums(shards[0].data, places)
    # The shards one below the other: an array of the same buffers. One program for all of them is
    # compiled once, not once for each device.
    mesh = Mesh(np.array([shard.device for shard in shards]), ("shards",))
    rows = NamedSharding(mesh, PartitionSpec("shards"))
    first, *others = shards[0].data.shape
    below = jax.make_array_from_single_device_arrays(
        (len(shards) * first, *others), rows, [shard.data for shard in shards]
    )
    return paced(_sums_of_shards(paced(below), jax.device_put(places, rows), mesh))


def _strides(shape: tuple[int, ...]) -> list[int]:
    """How far apart neighbours along each dimension are in row-major order, modulo 2**32."""
    return [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]


def _place(index: tuple[slice, ...], shape: tuple[int, ...], strides: list[int]) -> list[int]:
    """The row-major index of a shard's first element modulo 2**32, and the strides."""
    starts = (part.indices(size)[0] for part, size in zip(index, shape, strict=True))
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    return [first % 2**32, *strides]


def _shard_sums(shard: jax.Array, place: jax.Array) -> jax.Array:
    """The sums of a part of an array, uint32[1, 2].

    Args:
      shard: the part.
      place: `_place` of it, uint32[1, 1 + rank]: traced, so that shards of one shape share a
        program, wherever they belong.
    """
    words = _words(shard)
    index = _index(words[0].shape, place[0]) * np.uint32(len(words))
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
    return jnp.stack(sums)[None]


_sums = jax.jit(_shard_sums)


@functools.partial(jax.jit, static_argnums=2)
def _sums_of_shards(shards: jax.Array, places: jax.Array, mesh: Mesh) -> jax.Array:
    """The sums of each device's part, uint32[devices, 2]."""
    rows = PartitionSpec("shards")
    sums: jax.Array = jax.shard_map(_shard_sums, mesh=mesh, in_specs=rows, out_specs=rows)(
        shards, places
    )
    return sums


def _mixed(word: Any, index: Any) -> tuple[Any, Any]:
    """Two bijections of a word, chosen by its index; of uint32 arrays, JAX's or NumPy's."""
    spread = index * _SPREAD
    word = word ^ spread ^ (spread >> _15)
    word = (word ^ (word >> _16)) * _MULTIPLIERS[0]
    word = (word ^ (word >> _15)) * _MULTIPLIERS[1]
    word = word ^ (word >> _16)
    other = (word ^ (index * _OTHER)) * _MULTIPLIERS[2]
    return word, other ^ (other >> _15)


def _index(shape: tuple[int, ...], place: jax.Array) -> jax.Array:
    """The index in the whole array of every element of a part, modulo 2**32."""
    index = jnp.broadcast_to(place[0], shape)
    for dim in range(len(shape)):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, dim) * place[1 + dim]
    return index


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
