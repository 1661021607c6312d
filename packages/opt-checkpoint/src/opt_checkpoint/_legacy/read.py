"""Reading a legacy checkpoint, whoever wrote it, into nested plain dicts."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opt_checkpoint._legacy.msgpack import Limits, decode
from opt_checkpoint._legacy.npz import decode_npz
from opt_checkpoint.errors import LoadError

_PICKLED = (
    "this is a pickle. Loading one runs whatever code is in it, so it is never loaded here. Load "
    "it where it was written, with the libraries of the time, and write it again with "
    "`flax.serialization.to_bytes`"
)
# What a file of another format begins with, and what to say.
_OTHERS: Sequence[tuple[bytes, str]] = (
    (b"\x93NUMPY", "this is one array (`.npy`), no state dict; an `.npz` of many can be read"),
    (b"\x1f\x8b", "this is compressed with gzip: unpack it first"),
    (b"\x89HDF\r\n", "this is HDF5, which Flax and T5X never wrote"),
)


def read_legacy(
    source: bytes | bytearray | memoryview | str | os.PathLike[str],
    *,
    max_depth: int = Limits.depth,
    max_entries: int = Limits.entries,
    max_bytes: int | None = None,
) -> dict[str, Any]:
    """Returns a legacy checkpoint as nested plain dicts of NumPy arrays.

    It reads what `flax.serialization` has written since there is one (T5X, `flax.optim`,
    `TrainState`, wrapped Optax; arrays cut in chunks, bfloat16, complex, NumPy scalars), and `.npz`
    archives. It is safe on bytes of strangers: no pickle is ever loaded, and every size is checked
    before memory is taken for it.

    Args:
      source: the bytes, or the path of a file; T5X calls it `checkpoint` in its folder.
      max_depth: how deep dicts may be nested.
      max_entries: how many dicts, lists and leaves there may be.
      max_bytes: how many bytes the arrays of an archive may take together once unpacked. By default
        64 times the archive, or 64 MiB if that is more. Msgpack takes no more than its own size.

    Returns:
      Dicts with string keys; lists, numbers, strings and `None` as they were written. Arrays are
      read-only, and of msgpack views of the bytes read. `restore_state` copies.

    Raises:
      LoadError: it is no such checkpoint, damaged, of a dtype that no optimizer has, or asks for
        more than is allowed; says which entry.

    Examples:
      >>> import flax.serialization, numpy as np
      >>> data = flax.serialization.msgpack_serialize({'target': {'w': np.ones(2)}})
      >>> read_legacy(data)['target']['w'].tolist()
      [1.0, 1.0]
    """
    limits = Limits(max_depth, max_entries, max_bytes)
    if isinstance(source, bytes | bytearray | memoryview):
        return _read(bytes(source), limits)
    path = Path(source)
    try:
        return _read(_file(path), limits)
    except LoadError as error:
        raise LoadError(f"`{path}`: {error}") from error.__cause__


def _file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise LoadError("this is no file of a known size: a pipe or a device.")
            return file.read()
    except IsADirectoryError:
        raise LoadError(
            "this is a folder. T5X's msgpack file in it is called `checkpoint`; Orbax's folders "
            "are read by `Checkpointer`."
        ) from None


def _read(data: bytes, limits: Limits) -> dict[str, Any]:
    """Reads the format that the first bytes tell of."""
    if not data:
        raise LoadError("there are no bytes.")
    for magic, problem in _OTHERS:
        if data.startswith(magic):
            raise LoadError(f"{problem}.")
    if data.startswith(b"PK"):
        if b"data.pkl" in data[: 1 << 12]:
            raise LoadError(f"an archive of PyTorch: {_PICKLED}.")
        return decode_npz(data, limits)
    if _is_pickle(data):
        raise LoadError(f"{_PICKLED}.")
    value = decode(data, limits)
    if not isinstance(value, dict):
        raise LoadError(
            f"this is a single {type(value).__name__}, not the state dict of anything: no file "
            "that Flax wrote."
        )
    return value


def _is_pickle(data: bytes) -> bool:
    """Whether bytes are a pickle: of protocol 2 or later by its first, else by its last opcode.

    A state dict in msgpack begins with the byte of a map, which no pickle of protocol 0 or 1 does.
    """
    if data[:1] == b"\x80" and len(data) > 1:  # for msgpack an empty map, with bytes behind it
        return True
    return data[0] < 0x80 and data.rstrip(b"\n").endswith(b".")
