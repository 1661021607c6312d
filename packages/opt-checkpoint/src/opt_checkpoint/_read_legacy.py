"""Reading a legacy checkpoint, whoever wrote it, into nested plain dicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack  # type: ignore[import-untyped]  # it ships no types
import numpy as np

from opt_checkpoint.errors import LoadError

PLACEHOLDER = "PLACEHOLDER://"  # of T5X: an array in a folder next to the file
_CHUNKED = "__msgpack_chunked_array__"  # Flax's key for an array too large for one entry
# entries of a dict, and of a list, for which msgpack 1.1 allocates memory when it is announced
_MOST_KEYS, _MOST_LISTED = 1_000_000, 10_000
# how files of other formats begin, and what to say
_OTHERS = {
    b"\x80": (  # for msgpack an empty map, with bytes behind it
        "this is a pickle, which runs whatever code is in it, and is never loaded here. Load it "
        "where it was written, and write it again with `flax.serialization.to_bytes`"
    ),
    b"\x93NUMPY": "this is one array (`.npy`), not a state dict",
    b"PK": "this is an archive (of PyTorch, or an `.npz`), which Flax and T5X never wrote",
    b"\x1f\x8b": "this is compressed with gzip: unpack it first",
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
      LoadError: it is not such a checkpoint, is damaged, or has a dtype that no optimizer has.

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
        return _decoded(path.read_bytes())
    except IsADirectoryError:
        raise LoadError(
            f"`{path}`: this is a folder: `open_foreign` reads those of T5X and Orbax, "
            "`Checkpointer` its own."
        ) from None
    except LoadError as error:
        raise LoadError(f"`{path}`: {error}") from None


def _decoded(data: bytes) -> dict[str, Any]:
    for magic, problem in _OTHERS.items():
        if data.startswith(magic) and len(data) > len(magic):
            raise LoadError(f"{problem}.")
    try:
        value = msgpack.unpackb(
            data,
            ext_hook=_extension,
            object_pairs_hook=_entries,
            max_array_len=_MOST_LISTED,
            max_map_len=_MOST_KEYS,
        )
    except (OverflowError, TypeError, ValueError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise LoadError(f"not msgpack, or damaged: {text}.") from None
    if not isinstance(value, dict):
        raise LoadError(f"this is a single {type(value).__name__}, not a state dict of Flax.")
    return value


def _entries(pairs: list[tuple[str, Any]]) -> Any:
    """A dict, or the array that Flax has split into chunks."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError(f"one of the keys {[*entries]!s:.80} is there twice")
    if _CHUNKED not in entries:
        return entries
    chunks, shape = sequence_of(entries.get("chunks")), sequence_of(entries.get("shape"))
    if not chunks or shape is None:
        raise ValueError(f"`{_CHUNKED}` is not an array in chunks")
    array = np.concatenate(chunks).reshape(shape)
    array.flags.writeable = False
    return array


def _extension(code: int, payload: bytes) -> Any:
    """An array, a complex number or a scalar, as Flax packs them."""
    match code, msgpack.unpackb(payload):
        case 1, [list() as shape, str() as name, bytes() as buffer]:
            return _array(shape, name, buffer)
        case 2, [float() as real, float() as imaginary]:
            return complex(real, imaginary)
        case 3, [[], str() as name, bytes() as buffer]:
            return _array([], name, buffer)[()]
    raise ValueError(f"the extension {code} is not an array, complex number or scalar")


def _array(shape: list[Any], name: str, buffer: bytes) -> np.ndarray:
    """A view of the buffer; only of numbers and booleans."""
    dtype = jnp.dtype(name)
    if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        raise ValueError(f"the dtype {name!r:.80} is not that of numbers or booleans")
    array = np.frombuffer(buffer, dtype).reshape(shape)
    if array.shape != tuple(shape):  # NumPy infers a negative size
        raise ValueError(f"{shape} is not a shape")
    return array


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
