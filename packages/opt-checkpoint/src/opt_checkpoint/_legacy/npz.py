"""Archives of NumPy arrays (`.npz`): every size is declared, and checked before it is taken."""

from __future__ import annotations

import io
import itertools
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from flax.traverse_util import unflatten_dict

from opt_checkpoint._legacy.msgpack import DTYPES, Limits, array_in
from opt_checkpoint.errors import LoadError

_MAX_ARRAYS = 50_000  # `zipfile` makes a kilobyte of objects of each entry, before all else
_ENTRY = b"PK\x01\x02"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_EXPANSION = 64
_ALWAYS_ALLOWED = 64 << 20


def decode_npz(data: bytes, limits: Limits) -> dict[str, Any]:
    """Returns the arrays of an `.npz` archive by name, nested where a name has slashes."""
    if (count := data.count(_ENTRY)) > min(limits.entries, _MAX_ARRAYS):
        raise LoadError(
            f"the archive has {count} entries; at most {_MAX_ARRAYS} are read, or `max_entries`."
        )
    with _damages("the archive"):
        archive = zipfile.ZipFile(io.BytesIO(data))
    with archive:
        members = archive.infolist()
        allowed = limits.nbytes
        if allowed is None:
            allowed = max(_EXPANSION * len(data), _ALWAYS_ALLOWED)
        if (declared := sum(member.file_size for member in members)) > allowed:
            raise LoadError(
                f"the archive of {len(data)} bytes declares {declared} bytes of arrays; at most "
                f"{allowed} are made of it. Pass `max_bytes` if you trust it."
            )
        names = [_names(member, limits) for member in members]
        # In this order a name is followed by those that go on after a slash.
        for a, b in itertools.pairwise(sorted(names)):
            if a == b[: len(a)]:
                raise LoadError(
                    f"`{'/'.join(b)}`: another array's name is the same, or ends inside."
                )
        arrays = [_read(archive, member) for member in members]
    return dict(unflatten_dict(dict(zip(names, arrays, strict=True))))


@contextmanager
def _damages(what: str) -> Iterator[None]:
    """What `zipfile`, `zlib` and NumPy raise on damaged bytes, a dozen types, is a `LoadError`."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise LoadError(f"{what} is damaged, or none that NumPy writes: {error}") from None


def _names(member: zipfile.ZipInfo, limits: Limits) -> tuple[str, ...]:
    names = tuple(member.filename.removesuffix(".npy").split("/"))
    if not member.filename.endswith(".npy"):
        raise LoadError(f"`{member.filename}` in the archive is no array (`.npy`).")
    if len(names) > limits.depth:
        raise LoadError(f"`{member.filename[:80]}...` is more than {limits.depth} folders deep.")
    return names


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    def fail(problem: str) -> NoReturn:
        raise LoadError(f"`{member.filename}`: {problem}.")

    # Other methods unpack without a limit.
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        fail("compressed otherwise than NumPy does")
    with _damages(f"`{member.filename}`"), archive.open(member) as file:
        content = file.read(member.file_size)
    head = io.BytesIO(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns of literals such as `1or`
            shape, is_fortran, dtype = _HEADERS[np.lib.format.read_magic(head)](head)
    # Of text that is nested too deeply NumPy's parser makes a `MemoryError`.
    except (Exception, MemoryError) as error:
        fail(f"its header is none that NumPy writes: {str(error)[:80]}")
    if dtype != DTYPES.get(dtype.name):
        fail(f"the dtype {dtype.str!r} is none of a number's or a boolean's")
    start = head.tell()
    sizes = shape[::-1] if is_fortran else shape
    array = array_in(content, start, len(content) - start, dtype, sizes, fail)
    return array.T if is_fortran else array
