"""The MessagePack that Flax writes: untrusted bytes become plain dicts, within limits.

`flax.serialization.msgpack_restore` trusts what it reads: sizes, dtypes that hold pickles, repeated
keys.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import msgpack  # type: ignore[import-untyped]  # it ships no types
import numpy as np
from opt_core.extend import leaf_name

from opt_checkpoint.errors import LoadError

CHUNKED = "__msgpack_chunked_array__"  # Flax's key for an array too large for one entry
# numbers and booleans whose elements take whole bytes
DTYPES = {
    name: np.dtype(getattr(jnp, name))
    for name in (
        *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
        *(f"{kind}int{bits}" for kind in ("", "u") for bits in (2, 4, 8, 16, 32, 64)),
        *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
_MAX_DIMS = 32
_MAX_EXT = 2**32 - 2  # msgpack adds 1 in 32 bits
# The bytes that begin a value.
_MAPS = {*range(0x80, 0x90), 0xDE, 0xDF}
_LISTS = {*range(0x90, 0xA0), 0xDC, 0xDD}
_STRINGS = {*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB}


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much memory a file may request.

    Attributes:
      depth: how deep containers may be nested.
      entries: how many containers and leaves there may be in all.
      nbytes: how many bytes arrays may take together that are stored compressed; `None`: 64 times
        the file, and at least 64 MiB. Arrays that are not compressed take what the file takes.
    """

    depth: int = 100
    entries: int = 250_000
    nbytes: int | None = None


def decode(data: bytes, limits: Limits) -> Any:
    """Returns what MessagePack bytes hold: plain dicts and lists, read-only views, numbers."""
    reader = _Reader(data, limits)
    try:
        value = reader.value()
    except RecursionError:
        raise LoadError(f"nested too deeply for Python (`max_depth` {limits.depth}).") from None
    except msgpack.OutOfData:
        reader.fail("damaged: the file is cut short")
    except LoadError:
        raise
    except (ValueError, msgpack.UnpackException) as error:
        reader.fail(f"not msgpack, or damaged: {str(error) or type(error).__name__}")
    if rest := len(data) - reader.position:
        reader.fail(f"{rest} bytes follow after the end")
    return value


class _Reader:
    """One pass over the bytes: msgpack reads one head or leaf at a time, never a whole container.

    So every length is checked before memory is allocated for it, and errors name the entry.
    """

    def __init__(self, data: bytes, limits: Limits) -> None:
        self._data = data
        self._limits = limits
        self._path: list[str] = []
        self._entries = 0
        self._unpacker = msgpack.Unpacker(
            io.BytesIO(data),
            max_buffer_size=len(data),
            max_ext_len=min(len(data), _MAX_EXT),
            ext_hook=msgpack.ExtType,
        )

    @property
    def position(self) -> int:
        """How many bytes have been read."""
        return int(self._unpacker.tell())

    def fail(self, problem: str) -> NoReturn:
        """Raises the error, with the entry that is being read."""
        where = f"`{leaf_name(self._path)}`" if self._path else "the whole"
        raise LoadError(f"{where}: {problem} (byte {self.position} of {len(self._data)}).")

    def value(self) -> Any:
        """Reads one value with all that is in it."""
        head = self._head()
        if head in _MAPS:
            return self._map(self._unpacker.read_map_header())
        if head in _LISTS:
            count = self._unpacker.read_array_header()
            return [self._child(str(i)) for i in self._announced(count)]
        value = self._unpacker.unpack()
        if isinstance(value, msgpack.Timestamp):
            self.fail("Flax does not write timestamps")
        return self._extension(*value) if isinstance(value, msgpack.ExtType) else value

    def _head(self) -> int | None:
        """The byte that begins the next value; `None` at the end."""
        return next(iter(self._data[self.position : self.position + 1]), None)

    def _announced(self, count: int) -> range:
        """The positions of a container's entries, whose number it announces."""
        self._entries += count
        if self._entries > self._limits.entries:
            most = self._limits.entries
            self.fail(f"{count} entries are announced; at most {most} are read (`max_entries`)")
        if len(self._path) >= self._limits.depth:
            self.fail(f"containers are nested more than {self._limits.depth} deep (`max_depth`)")
        return range(count)

    def _child(self, name: str) -> Any:
        self._path.append(name)
        value = self.value()
        self._path.pop()
        return value

    def _map(self, count: int) -> Any:
        result: dict[str, Any] = {}
        for _ in self._announced(count):
            if (head := self._head()) is not None and head not in _STRINGS:
                self.fail("a key is not a string")
            key = self._unpacker.unpack()
            if key in result:
                self.fail(f"the key {key!r} is there twice")
            result[key] = self._child(key)
        return self._joined(result) if CHUNKED in result else result

    def _extension(self, code: int, payload: bytes) -> Any:
        content = msgpack.unpackb(payload, max_array_len=_MAX_DIMS, max_map_len=0, max_ext_len=0)
        match code, content:
            case 1, [list() as shape, str() as name, bytes() as buffer]:
                return self._array(shape, name, len(buffer))
            case 2, [float() as real, float() as imaginary]:
                return complex(real, imaginary)
            case 3, [[], str() as name, bytes() as buffer]:
                return self._array([], name, len(buffer))[()]
        return self.fail(f"the extension {code} is not an array, complex number or scalar")

    def _array(self, shape: list[Any], name: str, nbytes: int) -> np.ndarray:
        """A view of the file: its bytes are the last ones read."""
        if (dtype := DTYPES.get(name)) is None:
            self.fail(f"the dtype {name[:80]!r} is not that of numbers or booleans")
        return array_in(self._data, self.position - nbytes, nbytes, dtype, shape, self.fail)

    def _joined(self, entry: Mapping[str, Any]) -> np.ndarray:
        """The array that Flax has split into pieces."""
        shape, chunks = (sequence_of(entry.get(key)) for key in ("shape", "chunks"))
        if entry.keys() != {CHUNKED, "shape", "chunks"} or shape is None or not chunks:
            self.fail(f"`{CHUNKED}` is not an array in pieces, for which Flax reserves the key")
        if not all(
            isinstance(c, np.ndarray) and c.ndim == 1 and c.dtype == chunks[0].dtype for c in chunks
        ):
            self.fail("the pieces of an array are not vectors of one dtype")
        whole = np.concatenate(chunks)
        return array_in(whole, 0, whole.nbytes, whole.dtype, shape, self.fail)


def array_in(
    data: bytes | np.ndarray,
    start: int,
    nbytes: int,
    dtype: np.dtype,
    sizes: Sequence[Any],
    fail: Callable[[str], object],
) -> np.ndarray:
    """Returns a view of bytes as an array, after calling `fail` if they do not form one.

    Examples:
      >>> array_in(bytes(9), 1, 8, np.dtype('float32'), [2], print).tolist()
      [0.0, 0.0]
    """
    are_sizes = len(sizes) <= _MAX_DIMS and all(type(s) is int and s >= 0 for s in sizes)
    # NumPy counts the bytes as if no size were 0. The sizes are not shown: Python does not print
    # integers of too many digits.
    if not are_sizes or math.prod(max(s, 1) for s in sizes) * dtype.itemsize >= 2**63:
        fail(f"expected a shape of at most {_MAX_DIMS} non-negative sizes that fits in memory")
    expected = math.prod(sizes) * dtype.itemsize
    if nbytes != expected:
        fail(f"{dtype}{list(sizes)} takes {expected} bytes, not the {nbytes} bytes that it has")
    return np.frombuffer(data, dtype, math.prod(sizes), start).reshape(sizes)


def sequence_of(value: Any) -> list[Any] | None:
    """Returns the items of a list, or of `{'0': ..., '1': ...}`; `None` for anything else."""
    if isinstance(value, Mapping) and set(value) == {str(i) for i in range(len(value))}:
        value = [value[str(i)] for i in range(len(value))]
    return value if isinstance(value, list) else None
