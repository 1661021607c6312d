"""A strict reader of the MessagePack that Flax writes: bytes of strangers become plain dicts.

Nothing is allocated before its size was checked against the bytes that are there and against the
limits. Arrays are views of the bytes. Only what Flax has ever written is known: maps with string
keys, lists, numbers, strings, bytes, `None`, and three extensions (arrays, complex numbers, NumPy
scalars). `flax.serialization.msgpack_restore` reads more, and believes it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from opt_checkpoint._legacy.dtype_names import dtype_of
from opt_checkpoint._naming.schema import leaf_name
from opt_checkpoint.errors import LoadError

CHUNKED = "__msgpack_chunked_array__"  # Flax's key for an array too large for one entry
_MAX_DIMS = 32
_INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much a file may ask for.

    Attributes:
      depth: how deep containers may be nested.
      entries: how many containers and leaves there may be in all.
      nbytes: how many bytes arrays may take together that are stored compressed; `None`: 64 times
        the file, and at least 64 MiB. Arrays that are not compressed take what the file takes.
    """

    depth: int = 100
    entries: int = 250_000
    nbytes: int | None = None


DEFAULT = Limits()


class _Kind(enum.Enum):
    VALUE = "a number, a boolean or nil"
    STR = "a string"
    BIN = "bytes"
    ARRAY = "a list"
    MAP = "a map"
    EXT = "an extension"


_VALUES = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    code: struct.Struct(form)
    for code, form in zip(
        range(0xCA, 0xD4), (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q"), strict=True
    )
}
# Code -> kind, and how many bytes give the length.
_SIZED = {
    **{0xC4 + i: (_Kind.BIN, 1 << i) for i in range(3)},
    **{0xC7 + i: (_Kind.EXT, 1 << i) for i in range(3)},
    **{0xD9 + i: (_Kind.STR, 1 << i) for i in range(3)},
    0xDC: (_Kind.ARRAY, 2),
    0xDD: (_Kind.ARRAY, 4),
    0xDE: (_Kind.MAP, 2),
    0xDF: (_Kind.MAP, 4),
}
_FIXED_EXT = {0xD4 + i: 1 << i for i in range(5)}
_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3


def decode(data: bytes, limits: Limits = DEFAULT) -> Any:
    """Returns what MessagePack bytes hold: plain dicts and lists, read-only views, numbers.

    Args:
      data: all of the bytes.
      limits: how much they may ask for.

    Raises:
      LoadError: they are not what Flax writes, or ask for more than the limits; says where.
    """
    reader = _Reader(memoryview(data), limits)
    try:
        value = reader.value()
    except RecursionError:  # `max_depth` is larger than Python's own limit
        raise LoadError(
            f"containers are nested deeper than Python can follow; `max_depth` is {limits.depth}."
        ) from None
    if rest := len(data) - reader.position:
        reader.fail(f"{rest} bytes follow after the end; nothing may")
    return value


class _Reader:
    """One walk over the bytes."""

    def __init__(self, data: memoryview, limits: Limits) -> None:
        self.data = data
        self.limits = limits
        self.position = 0
        self.path: list[str] = []
        self.entries = 0

    def fail(self, problem: str) -> NoReturn:
        where = f"`{leaf_name(self.path)}`" if self.path else "the whole"
        raise LoadError(f"{where}: {problem} (byte {self.position} of {len(self.data)}).")

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        self.path.append(name)
        yield
        self.path.pop()

    def _take(self, size: int) -> memoryview:
        left = len(self.data) - self.position
        if size > left:
            self.fail(f"{size} bytes are announced, {left} are left: cut short, or no msgpack")
        self.position += size
        return self.data[self.position - size : self.position]

    def _uint(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def _token(self) -> tuple[_Kind, Any]:
        """Reads one head: a whole number, boolean or nil, or the length of what follows."""
        code = self._uint(1)
        if code < 0x80:
            return _Kind.VALUE, code
        if code >= 0xE0:
            return _Kind.VALUE, code - 0x100
        if code < 0x90:
            return _Kind.MAP, code & 0x0F
        if code < 0xA0:
            return _Kind.ARRAY, code & 0x0F
        if code < 0xC0:
            return _Kind.STR, code & 0x1F
        if code in _VALUES:
            return _Kind.VALUE, _VALUES[code]
        if code in _NUMBERS:
            form = _NUMBERS[code]
            return _Kind.VALUE, form.unpack(self._take(form.size))[0]
        if code in _FIXED_EXT:
            return _Kind.EXT, _FIXED_EXT[code]
        if code not in _SIZED:
            self.fail(f"the byte {code:#04x} begins nothing in msgpack")
        kind, size = _SIZED[code]
        return kind, self._uint(size)

    def value(self) -> Any:
        """Reads one value with all that is in it."""
        kind, content = self._token()
        match kind:
            case _Kind.VALUE:
                return content
            case _Kind.STR:
                return self._str(content)
            case _Kind.BIN:
                return bytes(self._take(content))
            case _Kind.EXT:
                return self._extension(self._uint(1), self._take(content))
            case _Kind.ARRAY:
                self._announce(content, 1)
                return [self._child(str(i)) for i in range(content)]
            case _Kind.MAP:
                return self._map(content)

    def _announce(self, count: int, smallest: int) -> None:
        """Checks how many entries a container says that it has, before anything is made of it."""
        left = len(self.data) - self.position
        if count * smallest > left:
            self.fail(f"{count} entries are announced, and {left} bytes are left")
        self.entries += count
        if self.entries > self.limits.entries:
            self.fail(
                f"there are more than {self.limits.entries} entries; pass `max_entries` if that "
                "many are meant"
            )
        if len(self.path) >= self.limits.depth:
            self.fail(f"containers are nested more than {self.limits.depth} deep (`max_depth`)")

    def _child(self, name: str) -> Any:
        with self._inside(name):
            return self.value()

    def _map(self, count: int) -> Any:
        self._announce(count, 2)
        result: dict[str, Any] = {}
        for _ in range(count):
            kind, size = self._token()
            if kind is not _Kind.STR:
                self.fail(f"a key is {kind.value}; a state dict has string keys only")
            key = self._str(size)
            if key in result:
                self.fail(f"the key {key!r} is there twice")
            result[key] = self._child(key)
        return self._joined(result) if CHUNKED in result else result

    def _str(self, size: int) -> str:
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8")

    def _extension(self, code: int, payload: memoryview) -> Any:
        inner = _Reader(payload, self.limits)
        inner.path = self.path
        if code == _COMPLEX:
            number = inner.complex_number()
            inner.finish()
            return number
        if code not in (_NDARRAY, _SCALAR):
            self.fail(f"the extension {code} is none of Flax's")
        array = inner.array()
        inner.finish()
        if code == _NDARRAY:
            return array
        if array.shape:
            self.fail(f"a NumPy scalar has the shape {array.shape}")
        return array[()]

    def finish(self) -> None:
        """Checks that nothing follows."""
        if rest := len(self.data) - self.position:
            self.fail(f"{rest} bytes follow after the end of an array or number")

    def complex_number(self) -> complex:
        """Reads `(real, imaginary)`: two floats and nothing else, so nothing can be nested here."""
        head = self._token()
        parts = [self._token() for _ in range(2)] if head == (_Kind.ARRAY, 2) else []
        if [(kind, type(part)) for kind, part in parts] != [(_Kind.VALUE, float)] * 2:
            self.fail("a complex number is not two floats")
        return complex(*(part for _, part in parts))

    def array(self) -> np.ndarray:
        """Reads `(shape, name of the dtype, bytes)`."""
        if self._token() != (_Kind.ARRAY, 3):
            self.fail("an array is not (shape, dtype, bytes)")
        kind, ndim = self._token()
        if kind is not _Kind.ARRAY or ndim > _MAX_DIMS:
            self.fail(f"a shape is {kind.value} (of {ndim}); expected at most {_MAX_DIMS} sizes")
        shape = tuple(self._token() for _ in range(ndim))
        kind, length = self._token()
        if kind not in (_Kind.STR, _Kind.BIN) or length > 64:
            self.fail(f"the name of a dtype is {kind.value} (of {length})")
        name = str(self._take(length), "latin-1")
        if (dtype := dtype_of(name)) is None:
            self.fail(f"the dtype {name!r} is none of a number's or a boolean's")
        sizes = check_shape(
            [size if of is _Kind.VALUE else None for of, size in shape], dtype, self.fail
        )
        kind, length = self._token()
        if kind is not _Kind.BIN or length != math.prod(sizes) * dtype.itemsize:
            self.fail(f"{name}{list(sizes)} takes other bytes than {kind.value} (of {length})")
        return np.frombuffer(self._take(length), dtype).reshape(sizes)

    def _joined(self, entry: Mapping[str, Any]) -> np.ndarray:
        """The array that Flax has cut in pieces."""
        shape, chunks = (_items(entry.get(key)) for key in ("shape", "chunks"))
        if entry.keys() != {CHUNKED, "shape", "chunks"} or shape is None or not chunks:
            self.fail(f"`{CHUNKED}` is no array in pieces, and no other key may be called so")
        first = chunks[0]
        if not all(isinstance(c, np.ndarray) and c.ndim == 1 for c in chunks) or not all(
            c.dtype == first.dtype for c in chunks
        ):
            self.fail("the pieces of an array are not vectors of one dtype")
        sizes = check_shape(shape, first.dtype, self.fail)
        if sum(c.size for c in chunks) != math.prod(sizes):
            self.fail(f"the pieces of an array do not make up its shape {sizes}")
        return np.concatenate(chunks).reshape(sizes)


def check_shape(
    sizes: Sequence[Any], dtype: np.dtype, fail: Callable[[str], object]
) -> tuple[int, ...]:
    """Returns a shape as a tuple, after calling `fail` with the problem if no array can have it.

    Args:
      sizes: whatever was found.
      dtype: of the array; NumPy counts its bytes as if no size were 0.
      fail: raises the error.

    Examples:
      >>> check_shape([2, 3], np.dtype('float32'), print)
      (2, 3)
    """
    if len(sizes) > _MAX_DIMS or not all(type(s) is int and s >= 0 for s in sizes):
        fail(f"a shape is not of at most {_MAX_DIMS} sizes from 0 on")
    # The sizes are not shown: Python refuses to print a number of too many digits.
    if math.prod(max(size, 1) for size in sizes) * dtype.itemsize > _INT64_MAX:
        fail("the shape is too large for any memory")
    return tuple(sizes)


def _items(value: Any) -> list[Any] | None:
    """The items of what Flax makes of a tuple: `{'0': ..., '1': ...}`."""
    if not isinstance(value, dict) or set(value) != {str(i) for i in range(len(value))}:
        return None
    return [value[str(i)] for i in range(len(value))]
