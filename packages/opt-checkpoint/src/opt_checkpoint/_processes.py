"""Errors that all processes of a run raise together, so that none waits for one that failed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils
from opt_core.errors import OptimizerError

from opt_checkpoint import errors
from opt_checkpoint.errors import CheckpointError

_BYTES = 1024  # of an error's text


def is_first() -> bool:
    """Whether this is the process that writes what only one may write."""
    return jax.process_index() == 0


@contextmanager
def sync_errors() -> Iterator[None]:
    """A block whose error is raised in all processes; all must reach its end."""
    error = None
    try:
        yield
    except OptimizerError as caught:
        error = caught
    if jax.process_count() > 1:
        text = f"{type(error).__name__} {error}".encode() if error is not None else b""
        padded = np.frombuffer(text[:_BYTES].ljust(_BYTES, b"\0"), np.uint8)
        texts = np.asarray(multihost_utils.process_allgather(padded))
        for process, message in enumerate(texts if error is None else ()):
            kind, _, what = message.tobytes().rstrip(b"\0").decode(errors="replace").partition(" ")
            if kind:
                is_plain = kind != "PlanError"  # that one carries a plan
                error_type = getattr(errors, kind, CheckpointError) if is_plain else CheckpointError
                raise error_type(f"process {process}: {what}")
    if error is not None:
        raise error


def are_equal(data: bytes) -> bool:
    """Whether all processes have the same data; all must call it."""
    if jax.process_count() == 1:
        return True
    mine = np.frombuffer(hashlib.sha256(data).digest(), np.uint8)
    all_ = np.asarray(multihost_utils.process_allgather(mine))
    return bool((all_ == all_[0]).all())
