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
    "this is a pickle, which runs whatever code is in it, and is never loaded here. Load it where "
    "it was written, and write it again with `flax.serialization.to_bytes`"
)
# how files of other formats begin, and what to say
_OTHERS: Sequence[tuple[bytes, str]] = (
    (
        b"\x93NUMPY",
        "this is one array (`.npy`), not a state dict; an `.npz` of several can be read",
    ),
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

    It reads what any version of `flax.serialization` has written (T5X, `flax.optim`,
    `TrainState`, wrapped Optax; arrays cut in chunks, bfloat16, complex, NumPy scalars), and `.npz`
    archives. It is safe on untrusted bytes: no pickle is ever loaded, and every size is checked
    before memory is allocated for it.

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
      LoadError: it is not such a checkpoint, is damaged, has a dtype that no optimizer has, or
        needs more memory than is allowed; says which entry.

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
                raise LoadError("this is not a regular file but a pipe or a device.")
            return file.read()
    except IsADirectoryError:
        raise LoadError(
            "this is a folder: `open_foreign` reads those of T5X and Orbax, `Checkpointer` its own."
        ) from None


def _read(data: bytes, limits: Limits) -> dict[str, Any]:
    """Reads the format that the first bytes announce."""
    if not data:
        raise LoadError("the file is empty.")
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
        raise LoadError(f"this is a single {type(value).__name__}, not a state dict of Flax.")
    return value


def _is_pickle(data: bytes) -> bool:
    """Whether bytes are a pickle: of protocol 2 or later by its first, else by its last opcode.

    A state dict in msgpack begins with the byte of a map, which no pickle of protocol 0 or 1 does.
    """
    if data[:1] == b"\x80" and len(data) > 1:  # for msgpack an empty map, with bytes behind it
        return True
    return data[0] < 0x80 and data.rstrip(b"\n").endswith(b".")
