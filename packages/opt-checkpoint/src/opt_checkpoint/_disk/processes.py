"""Errors that every process of a run learns of, so that none waits for one that has given up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from opt_checkpoint.errors import (
    CheckpointError,
    DamagedError,
    ForeignError,
    LeafError,
    LoadError,
    LockError,
    MissingError,
    SaveError,
    VersionError,
)

_KINDS: tuple[type[CheckpointError], ...] = (
    DamagedError,
    ForeignError,
    LeafError,
    LoadError,
    LockError,
    MissingError,
    SaveError,
    VersionError,
    CheckpointError,  # all others
)
_BYTES = 1024


def is_first() -> bool:
    """Whether this is the process that writes what is written once."""
    return jax.process_index() == 0


def agree(error: CheckpointError | None) -> None:
    """Raises in every process the error that one of them has; all processes must call it.

    Args:
      error: of this process, or `None`.
    """
    if jax.process_count() == 1:
        if error is not None:
            raise error
        return
    told = multihost_utils.process_allgather(_pack(error))
    if error is not None:
        raise error
    for process, message in enumerate(np.asarray(told)):
        if message[0]:
            _raise(process, message)


@contextmanager
def together() -> Iterator[None]:
    """A block whose error is raised in every process; all processes must come to its end."""
    error = None
    try:
        yield
    except CheckpointError as found:
        error = found
    agree(error)


def are_equal(data: bytes) -> bool:
    """Whether all processes have the same data; all must call it."""
    if jax.process_count() == 1:
        return True
    mine = np.frombuffer(hashlib.sha256(data).digest(), np.uint8)
    all_ = np.asarray(multihost_utils.process_allgather(mine))
    return bool((all_ == all_[0]).all())


def _pack(error: CheckpointError | None) -> np.ndarray[Any, Any]:
    packed = np.zeros(_BYTES, np.uint8)
    if error is not None:
        text = str(error).encode()[: _BYTES - 1]
        kind = next(i for i, kind in enumerate(_KINDS) if isinstance(error, kind))
        packed[0] = kind + 1
        packed[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
    return packed


def _raise(process: int, packed: np.ndarray[Any, Any]) -> NoReturn:
    text = packed[1:].tobytes().rstrip(b"\0").decode(errors="replace")
    raise _KINDS[int(packed[0]) - 1](f"process {process}: {text}")
