"""Reading a legacy checkpoint, whoever wrote it, into nested plain dicts."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack  # type: ignore[import-untyped]  # it ships no types
import numpy as np
from opt_core.extend import Names, path_str

from opt_checkpoint.errors import LoadError

PLACEHOLDER = "PLACEHOLDER://"  # of T5X: an array in a folder next to the file
_CHUNKED = "__msgpack_chunked_array__"  # Flax's key for an array too large for one entry
# entries of a dict, and of a list, for which msgpack 1.1 allocates memory when it is announced
_MOST_KEYS, _MOST_LISTED = 1_000_000, 10_000
_PICKLED = (
    "this is a pickle, which runs whatever code is in it, and is never loaded here. Load it where "
    "it was written, and write it again with `flax.serialization.to_bytes`"
)
# how files of other formats begin, and what to say
_OTHERS = {
    b"\x93NUMPY": "this is one array (`.npy`), not a state dict",
    b"PK": "this is an archive (of PyTorch, or an `.npz`), which Flax and T5X never wrote",
    b"\x1f\x8b": "this is compressed with gzip: unpack it first",
    b"\x89HDF\r\n": "this is HDF5, which Flax and T5X never wrote",
}


def read_legacy(
    source: bytes | bytearray | memoryview | str | os.PathLike[str],
) -> dict[str, Any]:
    """Returns a legacy checkpoint as nested plain dicts of NumPy arrays.

    It reads what any version of `flax.serialization` has written: T5X, `flax.optim`, `TrainState`,
    wrapped Optax; arrays cut in chunks, bfloat16, complex, NumPy scalars. No pickle is ever loaded,
    and what the bytes announce is compared with their number before memory is allocated for it.

    Args:
      source: the bytes, or the path of a file; T5X calls it `checkpoint` in its folder.

    Returns:
      Dicts with string keys; lists, numbers, strings and `None` as they were written. Arrays are
      read-only. `restore_state` copies.

    Raises:
      LoadError: it is not such a checkpoint, is damaged, or has a dtype that no optimizer has; says
        which entry.

    Examples:
      >>> import flax.serialization, numpy as np
      >>> data = flax.serialization.msgpack_serialize({'target': {'w': np.ones(2)}})
      >>> read_legacy(data)['target']['w'].tolist()
      [1.0, 1.0]
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return _decoded(bytes(source))
    path = Path(source)
    try:
        return _decoded(_contents(path))
    except LoadError as error:
        raise LoadError(f"`{path}`: {error}") from error.__cause__


def _contents(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise LoadError("this is not a regular file but a pipe or a device.")
            return file.read()
    except IsADirectoryError:
        raise LoadError(
            "this is a folder: `open_foreign` reads those of T5X and Orbax, `Checkpointer` its own."
        ) from None


def _decoded(data: bytes) -> dict[str, Any]:
    if not data:
        raise LoadError("the file is empty.")
    for magic, problem in _OTHERS.items():
        if data.startswith(magic):
            raise LoadError(f"{problem}.")
    if _is_pickle(data):
        raise LoadError(f"{_PICKLED}.")
    try:
        value = msgpack.unpackb(
            data,
            ext_hook=_extension,
            object_pairs_hook=_unique,
            max_array_len=_MOST_LISTED,
            max_map_len=_MOST_KEYS,
        )
    except (ValueError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise LoadError(f"not msgpack, or damaged: {text}.") from None
    if not isinstance(value, dict):
        raise LoadError(f"this is a single {type(value).__name__}, not a state dict of Flax.")
    contents: dict[str, Any] = _checked(value, ())
    return contents


def _is_pickle(data: bytes) -> bool:
    """Whether bytes are a pickle: of protocol 2 or later by its first, else by its last opcode.

    A state dict in msgpack begins with the byte of a map, which no pickle of protocol 0 or 1 does.
    """
    if data[:1] == b"\x80" and len(data) > 1:  # for msgpack an empty map, with bytes behind it
        return True
    return data[0] < 0x80 and data.rstrip(b"\n").endswith(b".")


@dataclasses.dataclass(frozen=True)
class _Unreadable:
    """What is in place of an entry that cannot be read, until its path is known."""

    problem: str


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"the key {key!r:.80} is there twice")
        entries[key] = value
    return entries


def _extension(code: int, payload: bytes) -> Any:
    """An array, a complex number or a scalar, as Flax packs them."""
    try:
        content = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        return _Unreadable(f"damaged: {error}")
    match code, content:
        case 1, [list() as shape, str() as name, bytes() as buffer]:
            return _array(shape, name, buffer)
        case 2, [float() as real, float() as imaginary]:
            return complex(real, imaginary)
        case 3, [[], str() as name, bytes() as buffer]:
            array = _array([], name, buffer)
            return array[()] if isinstance(array, np.ndarray) else array
    return _Unreadable(f"the extension {code} is not an array, complex number or scalar")


def _array(shape: list[Any], name: str, buffer: bytes) -> np.ndarray | _Unreadable:
    """A view of the buffer; only of numbers and booleans."""
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    if not is_number or dtype.name != name:
        return _Unreadable(f"the dtype {name[:80]!r} is not that of numbers or booleans")
    if not all(type(size) is int and size >= 0 for size in shape):
        return _Unreadable("expected a shape of non-negative sizes")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(buffer):
        return _Unreadable(f"{name}{shape} takes {expected} bytes, not the {len(buffer)} it has")
    try:
        return np.ndarray(shape, dtype, buffer)
    except ValueError as error:  # too many sizes, or of an empty array too large ones
        return _Unreadable(f"NumPy has no array of this shape: {error}")


def _checked(value: Any, path: Names) -> Any:
    """The value with arrays in one piece; raises an error with the path of what is unreadable."""
    if isinstance(value, dict):
        entries = {key: _checked(child, (*path, str(key))) for key, child in value.items()}
        value = _joined(entries) if _CHUNKED in entries else entries
    elif isinstance(value, list):
        value = [_checked(child, (*path, str(i))) for i, child in enumerate(value)]
    elif isinstance(value, msgpack.Timestamp):
        value = _Unreadable("Flax does not write timestamps")
    if isinstance(value, _Unreadable):
        raise LoadError(f"`{path_str(path)}`: {value.problem}.")
    return value


def _joined(entry: Mapping[str, Any]) -> np.ndarray | _Unreadable:
    """The array that Flax has split into chunks."""
    chunks, shape = sequence_of(entry.get("chunks")), sequence_of(entry.get("shape"))
    if entry.keys() != {_CHUNKED, "shape", "chunks"} or not chunks or shape is None:
        return _Unreadable(
            f"`{_CHUNKED}` is not an array in chunks, for which Flax reserves the key"
        )
    if len({chunk.dtype if isinstance(chunk, np.ndarray) else None for chunk in chunks}) > 1:
        return _Unreadable("the chunks of an array are not of one dtype")
    try:
        whole = np.concatenate(chunks).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        return _Unreadable(f"the chunks of an array do not fit together: {error!s:.200}")
    whole.flags.writeable = False
    return whole


def is_elsewhere(value: Any) -> bool:
    """Whether an entry stands for an array in a TensorStore folder next to the file."""
    if isinstance(value, Mapping):
        return value.keys() >= {"driver", "kvstore", "metadata"}
    return isinstance(value, str) and value.startswith(PLACEHOLDER)


def sequence_of(value: Any) -> list[Any] | None:
    """Returns the items of a list, or of `{'0': ..., '1': ...}`; `None` for anything else."""
    if isinstance(value, Mapping) and set(value) == {str(i) for i in range(len(value))}:
        value = [value[str(i)] for i in range(len(value))]
    return value if isinstance(value, list) else None
