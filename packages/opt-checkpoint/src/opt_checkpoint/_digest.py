"""A digest of an array's bits that is the same on every mesh.

Every word of an array is mixed with its global index, twice over, and the results are summed
modulo 2**32: two sums are the 64 bits of the digest. A sum has no order, so it does not matter
which device holds which part. At a given index both mixes are bijections of the word, so one
changed word always changes both sums. They are far from linear, so that no pattern of damage, such
as flipped signs or swapped words, cancels systematically: several changed words go unnoticed about
once in 2**64. Indices are modulo 2**32. It detects faults, not forgeries.

Devices do not communicate. Every distinct part of an array is summed by one process, and the sums
of all processes are added. Large parts are summed by a compiled program, where they are; small ones
by NumPy.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Sums = np.ndarray[Any, Any]  # uint32[arrays, 2]
# Of a part: the row-major index of its first element in the whole array, and its strides in it,
# modulo 2**32. `None` for a whole array.
_Place = list[int]
_WHOLE: list[_Place | None] = [None]

_SPREAD, _OTHER = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77)
_MULTIPLIERS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B), np.uint32(0xC2B2AE3D)
_15, _16 = np.uint32(15), np.uint32(16)
_BLOCK = 1 << 15  # words that stay in the cache between NumPy's operations
_LARGE = 1 << 18  # bytes from which a compiled program pays


class Digests:
    """The digests of some arrays, which may be donated once this exists.

    On an accelerator, large parts are summed by programs that have been started, and small ones are
    copied. On CPU, references are held: JAX does not reuse memory that is referenced.

    The arrays are `jax.Array`s of any sharding, dtype and memory kind except typed keys, or NumPy
    arrays that nobody writes to. `partial` has the positions of those of which other processes hold
    parts.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.partial: list[int] = []
        self._count = len(arrays)
        # Columns: thousands of tuples would trigger the garbage collector while training waits.
        self._numbers: list[int] = []
        self._parts: list[Any] = []
        self._places: list[_Place | None] = []
        self._on_device: list[tuple[int, jax.Array]] = []
        is_cpu = jax.default_backend() == "cpu"
        for i, array in enumerate(arrays):
            if not isinstance(array, jax.Array) or isinstance(array.sharding, SingleDeviceSharding):
                parts, places = [array], _WHOLE
            else:
                parts, places = _distinct_parts(array)
                if not array.is_fully_addressable:
                    self.partial.append(i)
            if not is_cpu and parts and _is_large_on_device(parts[0]):
                self._on_device.append((i, _device_sums(parts, places)))
                continue
            self._numbers += [i] * len(parts)
            self._parts += parts
            self._places += places
        if not is_cpu:
            for part in self._parts:
                if isinstance(part, jax.Array):
                    part.copy_to_host_async()
        self._parts = [np.asarray(part) for part in self._parts]

    def sums(self) -> Sums:
        """Waits, and returns the sums of the parts that this process is responsible for."""
        total = np.zeros((self._count, 2), np.uint32)
        is_cpu = jax.default_backend() == "cpu"
        alike = defaultdict(list)  # small parts of one shape and place, for NumPy to sum together
        for i, part, known in zip(self._numbers, self._parts, self._places, strict=True):
            words = _host_words(part)
            # The words of an element are one more dimension, whose stride is 1.
            place = known or [0, *_strides(part.shape)]
            place = [*(at * words.shape[-1] % 2**32 for at in place), 1]
            if is_cpu and words.nbytes >= _LARGE:
                on_cpu = jax.device_put(words, jax.local_devices()[0])
                total[i] += np.asarray(_device_sums([on_cpu], [place]))[0]
            else:
                alike[words.shape, words.dtype, tuple(place)].append((i, words))
        for (shape, _, at), members in alike.items():
            index = _index(np, shape, at).reshape(-1)
            several = max(_BLOCK // max(index.size, 1), 1)
            for start in range(0, len(members), several):
                numbers, rows = zip(*members[start : start + several], strict=True)
                sums = _row_sums(np.stack(rows).reshape(len(rows), -1), index)
                np.add.at(total, [*numbers], sums)
        for i, of_parts in self._on_device:
            total[i] += np.asarray(of_parts).sum(axis=0, dtype=np.uint32)
        return total


def digests(arrays: Sequence[Any]) -> list[str]:
    """Returns the digests of arrays; all processes must call it if an array spans several."""
    pending = Digests(arrays)
    sums = pending.sums()
    if pending.partial:
        every = np.asarray(multihost_utils.process_allgather(sums[pending.partial]))
        sums[pending.partial] = every.sum(axis=0, dtype=np.uint32)
    return [to_hex(pair) for pair in sums]


def to_hex(pair: Any) -> str:
    """Returns two sums as 16 hexadecimal digits."""
    first, second = pair.tolist()
    return f"{first:08x}{second:08x}"


def bound(name: str, digest: str) -> str:
    """Returns a digest bound to the name of its leaf; of a bound one, the digest itself."""
    mask = hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8]
    return f"{int(digest, 16) ^ int.from_bytes(mask):016x}"


def _distinct_parts(array: jax.Array) -> tuple[list[Any], list[_Place | None]]:
    """The parts of an array that this process is responsible for, and their places."""
    # Of all devices that hold the same part, in any process, one holds replica 0.
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    strides = _strides(array.shape)
    places: list[_Place | None] = []
    for shard in shards:
        starts = (part.indices(n)[0] for part, n in zip(shard.index, array.shape, strict=True))
        first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        places.append([first % 2**32, *strides])
    return [shard.data for shard in shards], places


def _strides(shape: tuple[int, ...]) -> list[int]:
    """The row-major strides, modulo 2**32."""
    return [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]


def _is_large_on_device(part: Any) -> bool:
    if not isinstance(part, jax.Array) or part.ndim == 0 or part.nbytes < _LARGE:
        return False
    (device,) = part.devices()
    return part.sharding.memory_kind in (None, device.default_memory().kind)


def _device_sums(parts: Sequence[jax.Array], places: Sequence[_Place | None]) -> jax.Array:
    """The sums of large parts of one shape, each on its device, uint32[parts, 2]."""
    # The parts stacked as an array of the same buffers: one program is compiled for all of them,
    # not one per device.
    mesh = Mesh(np.array([part.device for part in parts]), ("parts",))
    rows = NamedSharding(mesh, PartitionSpec("parts"))
    height, *others = parts[0].shape
    stacked = jax.make_array_from_single_device_arrays(
        (len(parts) * height, *others), rows, list(parts)
    )
    known = [place or [0, *_strides(parts[0].shape)] for place in places]
    placed = jax.device_put(np.array(known, np.uint32), rows)
    sums: jax.Array = _sums(stacked, placed, mesh)
    return sums


def _row_sums(words: np.ndarray[Any, Any], index: np.ndarray[Any, Any]) -> Sums:
    """The sums of each row of words, uint32[rows, 2]."""
    total = np.zeros((len(words), 2), np.uint32)
    for start in range(0, index.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        mixed = _mixed(words[:, block].astype(np.uint32), index[block])
        total += np.stack([np.sum(x, axis=1, dtype=np.uint32) for x in mixed], axis=1)
    return total


@functools.partial(jax.jit, static_argnums=2)
def _sums(stacked: jax.Array, places: jax.Array, mesh: Mesh) -> jax.Array:
    """The sums of each device's part, uint32[devices, 2]."""
    rows = PartitionSpec("parts")
    sums: jax.Array = jax.shard_map(_part_sums, mesh=mesh, in_specs=rows, out_specs=rows)(
        stacked, places
    )
    return sums


def _part_sums(part: jax.Array, place: jax.Array) -> jax.Array:
    """The sums of a part of an array, uint32[1, 2]; `place`, uint32[1, 1 + rank], is traced."""
    words = _words(part)
    index = _index(jnp, words[0].shape, place[0]) * np.uint32(len(words))
    mixed = [_mixed(word, index + np.uint32(j)) for j, word in enumerate(words)]
    first, second = (functools.reduce(jnp.add, column) for column in zip(*mixed, strict=True))
    zero = np.uint32(0)
    # One reduction with two results reads the array once and stores no intermediates.
    sums = lax.reduce(
        (first, second),
        (zero, zero),
        lambda left, right: (left[0] + right[0], left[1] + right[1]),
        tuple(range(first.ndim)),
    )
    return jnp.stack(sums)[None]


def _mixed(word: Any, index: Any) -> tuple[Any, Any]:
    """Two bijections of a word, selected by its index; of uint32 arrays of JAX or NumPy."""
    spread = index * _SPREAD
    word = word ^ spread ^ (spread >> _15)
    word = (word ^ (word >> _16)) * _MULTIPLIERS[0]
    word = (word ^ (word >> _15)) * _MULTIPLIERS[1]
    word = word ^ (word >> _16)
    other = (word ^ (index * _OTHER)) * _MULTIPLIERS[2]
    return word, other ^ (other >> _15)


def _index(xp: Any, shape: tuple[int, ...], place: Any) -> Any:
    """The index in the whole array of every element of a part, modulo 2**32; of NumPy or JAX."""
    index = xp.full((), place[0], xp.uint32)
    for dim, size in enumerate(shape):
        index = index[..., None] + xp.arange(size, dtype=xp.uint32) * xp.uint32(place[1 + dim])
    return index


def _words(leaf: jax.Array) -> list[jax.Array]:
    """The bits of every element as uint32 words, the lowest first."""
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [*_words(lax.real(leaf)), *_words(lax.imag(leaf))]
    if dtype == jnp.bool_:
        return [leaf.astype(jnp.uint32)]
    bits = _bits(dtype)
    if bits == 64:
        halves = lax.bitcast_convert_type(leaf, jnp.uint32)
        return [halves[..., 0], halves[..., 1]]
    return [lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint32)]


def _host_words(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same as uint8, uint16 or uint32; the words of an element are the last dimension."""
    array = np.asarray(array, order="C")
    size = array.dtype.itemsize
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    words = array.reshape(*array.shape, 1).view(f"uint{8 * min(size // (1 + is_complex), 4)}")
    if size == 1 and array.dtype != np.bool_ and _bits(array.dtype) < 8:
        words = words & np.uint8(2 ** _bits(array.dtype) - 1)  # NumPy stores each in a byte
    return words


def _bits(dtype: Any) -> int:
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(info(dtype).bits)
