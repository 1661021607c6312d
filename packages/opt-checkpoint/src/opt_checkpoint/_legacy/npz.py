"""A strict reader of `.npz` archives: every size is declared, and checked before it is taken."""

from __future__ import annotations

import ast
import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from opt_checkpoint._legacy.msgpack import DEFAULT, Limits, check_shape
from opt_checkpoint.errors import LoadError

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000
_MAX_DIRECTORY = 4 << 20  # some 50,000 arrays
_EXPANSION = 64
_ALWAYS_ALLOWED = 64 << 20
# What Python warns of in a literal (`1or`, `\d`), and NumPy does not write.
_QUOTED, _WARNED = re.compile(r"'[^'\\]*'"), re.compile(r"\\|\d[^\W\d]")
_END, _END_SIZE = b"PK\x05\x06", 22
_LONG_END, _LONG_END_SIZE, _LOCATOR_SIZE = b"PK\x06\x06", 56, 20
# What `zipfile` raises on bytes that are no archive. An offset out of place is a `ValueError` or an
# `OverflowError`, a name that is not UTF-8 a `UnicodeDecodeError`, a field cut short a
# `struct.error`, an encrypted member a `RuntimeError`, and so is `NotImplementedError`.
_DAMAGES = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


def decode_npz(data: bytes, limits: Limits = DEFAULT) -> dict[str, Any]:
    """Returns the arrays of an `.npz` archive by name, nested where a name has slashes.

    Args:
      data: the bytes of the archive.
      limits: how much it may ask for.

    Raises:
      LoadError: it is damaged, holds anything but plain arrays, or declares more than the limits.
    """
    _check_directory(data)
    with _damages("the archive"):
        archive = zipfile.ZipFile(io.BytesIO(data))
    with archive:
        members = archive.infolist()
        _check_sizes(members, len(data), limits)
        arrays = {tuple(_names(m)): _read(archive, m) for m in members}
    return _nested(arrays)


@contextmanager
def _damages(what: str) -> Iterator[None]:
    """What `zipfile` raises on damaged bytes becomes a `LoadError` about `what`."""
    try:
        yield
    except LoadError:
        raise
    except _DAMAGES as error:
        raise LoadError(f"{what} is damaged, or none that NumPy writes: {error}") from None


def _check_directory(data: bytes) -> None:
    """Checks the size of the table of contents, of which `zipfile` makes objects at once."""
    end = data.rfind(_END, max(0, len(data) - _END_SIZE - (1 << 16)))
    if end < 0 or len(data) - end < _END_SIZE:
        raise LoadError("the archive has no end: it is cut short, or damaged.")
    sizes = list(struct.unpack_from("<I", data, end + 12))
    long_end = end - _LOCATOR_SIZE - _LONG_END_SIZE
    if long_end >= 0 and data[long_end : long_end + 4] == _LONG_END:
        sizes += struct.unpack_from("<Q", data, long_end + 40)
    if max(sizes) > _MAX_DIRECTORY:
        raise LoadError(
            f"the archive declares {max(sizes)} bytes of names; at most {_MAX_DIRECTORY} are read."
        )


def _check_sizes(members: list[zipfile.ZipInfo], size: int, limits: Limits) -> None:
    allowed = limits.nbytes
    if allowed is None:
        allowed = max(_EXPANSION * size, _ALWAYS_ALLOWED)
    declared = sum(member.file_size for member in members)
    if declared > allowed:
        raise LoadError(
            f"the archive of {size} bytes declares {declared} bytes of arrays; at most {allowed} "
            "are made of it. Pass `max_bytes` if you trust it."
        )
    if len(members) > limits.entries:
        raise LoadError(f"there are more than {limits.entries} arrays (`max_entries`).")
    if len({member.filename for member in members}) < len(members):
        raise LoadError("two arrays of the archive have one name.")


def _names(member: zipfile.ZipInfo) -> list[str]:
    if not member.filename.endswith(".npy"):
        raise LoadError(f"`{member.filename}` in the archive is no array (`.npy`).")
    return member.filename.removesuffix(".npy").split("/")


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    def fail(problem: str) -> NoReturn:
        raise LoadError(f"`{member.filename}`: {problem}.")

    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        fail("compressed otherwise than NumPy does")
    with _damages(f"`{member.filename}`"), archive.open(member) as file:
        dtype, shape, is_fortran, header_size = _header(file, fail)
        nbytes = math.prod(shape) * dtype.itemsize
        if header_size + nbytes != member.file_size:
            fail(f"{dtype}{list(shape)} takes {nbytes} bytes; {member.file_size} are declared")
        content = file.read()
    if len(content) != nbytes:
        fail("cut short")
    array = np.frombuffer(content, dtype)
    return array.reshape(shape, order="F" if is_fortran else "C")


def _header(
    file: Any, fail: Callable[[str], NoReturn]
) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """Reads the head of one `.npy`: what the array is, and how long the head was."""
    magic = file.read(8)
    if magic[:6] != _MAGIC or magic[6:] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        fail("no `.npy` of a known version")
    form = struct.Struct("<H" if magic[6] == 1 else "<I")
    packed = file.read(form.size)
    length = form.unpack(packed)[0] if len(packed) == form.size else _MAX_HEADER + 1
    if length > _MAX_HEADER:
        fail("its header is cut short, or too long")
    try:
        header = _literal(file.read(length).decode("utf-8"))
        descr, is_fortran, shape = header["descr"], header["fortran_order"], header["shape"]
    # `literal_eval` names `MemoryError` among what it raises on text nested too deeply.
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        fail("its header says nothing that NumPy writes")
    if not isinstance(descr, str) or not isinstance(is_fortran, bool) or len(header) != 3:
        fail("its header describes no plain array")
    dtype = _plain_dtype(descr)
    if dtype is None:
        fail(f"the dtype {descr[:80]!r} is none of a number's or a boolean's")
    shape = check_shape(shape if type(shape) is tuple else [None], dtype, fail)
    return dtype, shape, is_fortran, len(magic) + len(packed) + length


def _literal(text: str) -> Any:
    if _WARNED.search(_QUOTED.sub("", text)):
        raise ValueError(text)
    return ast.literal_eval(text)


def _plain_dtype(descr: str) -> np.dtype | None:
    kinds = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
    known = {f"{order}{kind}{n}" for kind, sizes in kinds.items() for n in sizes for order in "<|"}
    return np.dtype(descr) if descr in known else None


def _nested(arrays: dict[tuple[str, ...], np.ndarray]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for names, array in arrays.items():
        node: Any = root
        for name in names[:-1]:
            node = node.setdefault(name, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or names[-1] in node:
            raise LoadError(f"`{'/'.join(names)}`: another array's name begins or ends there.")
        node[names[-1]] = array
    return root
