"""Archives of NumPy arrays (`.npz`): every declared size is checked before it is allocated."""

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

_MAX_ARRAYS = 50_000  # `zipfile` makes a kilobyte of objects per entry on opening
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
        default = max(_EXPANSION * len(data), _ALWAYS_ALLOWED)
        allowed = default if limits.nbytes is None else limits.nbytes
        if (declared := sum(member.file_size for member in members)) > allowed:
            raise LoadError(
                f"the archive of {len(data)} bytes declares {declared} bytes of arrays; at most "
                f"{allowed} are made of it. Pass `max_bytes` if you trust it."
            )
        names = [_names(member, limits) for member in members]
        # sorted, a name is followed by those that continue it after a slash
        for a, b in itertools.pairwise(sorted(names)):
            if a == b[: len(a)]:
                raise LoadError(f"`{'/'.join(b)}`: another array's name is its beginning.")
        arrays = [_read(archive, member) for member in members]
    return dict(unflatten_dict(dict(zip(names, arrays, strict=True))))


@contextmanager
def _damages(what: str) -> Iterator[None]:
    """Turns the dozen types of errors that damaged bytes cause into a `LoadError`."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise LoadError(f"{what} is damaged, or NumPy did not write it: {error}") from None


def _names(member: zipfile.ZipInfo, limits: Limits) -> tuple[str, ...]:
    names = tuple(member.filename.removesuffix(".npy").split("/"))
    if not member.filename.endswith(".npy"):
        raise LoadError(f"`{member.filename}` in the archive is not an array (`.npy`).")
    if len(names) > limits.depth:
        raise LoadError(f"`{member.filename[:80]}...` is more than {limits.depth} folders deep.")
    return names


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    def fail(problem: str) -> NoReturn:
        raise LoadError(f"`{member.filename}`: {problem}.")

    # other methods unpack without a limit
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        fail("this compression is not NumPy's")
    with _damages(f"`{member.filename}`"), archive.open(member) as file:
        content = file.read(member.file_size)
    head = io.BytesIO(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns of literals such as `1or`
            shape, is_fortran, dtype = _HEADERS[np.lib.format.read_magic(head)](head)
    # NumPy's parser raises a `MemoryError` for text that is nested too deeply
    except (Exception, MemoryError) as error:
        fail(f"NumPy did not write its header: {str(error)[:80]}")
    if dtype != DTYPES.get(dtype.name):
        fail(f"the dtype {dtype.str!r} is not that of numbers or booleans")
    start = head.tell()
    sizes = shape[::-1] if is_fortran else shape
    array = array_in(content, start, len(content) - start, dtype, sizes, fail)
    return array.T if is_fortran else array
