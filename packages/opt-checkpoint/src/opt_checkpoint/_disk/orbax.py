"""What Orbax stores, read and described: parts of trees, their shardings, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from opt_checkpoint._disk.manifest import item_folder
from opt_checkpoint._naming.names import is_wide
from opt_checkpoint.errors import CheckpointError, DamagedError, MissingError

_T = TypeVar("_T")


def restore_arrays(folder: Path, item: Any, restore_args: Any) -> Any:
    """Reads some arrays of a step into the given shardings."""
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    with closing(ocp.PyTreeCheckpointHandler()) as handler:  # after a failure it cannot be reused
        return handler.restore(item_folder(folder), args=args)


def restore_args(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Any:
    """Returns how to read an array; a dtype of `None` is that of the store."""
    if dtype is not None and is_wide(dtype):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    place = sharding or SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=place, global_shape=shape, dtype=dtype)


def sharding_of(metadata: Any) -> NamedSharding | None:
    """Returns where an array was on a mesh, from Orbax's metadata of it.

    A mesh of devices that this process does not have is an `AbstractMesh`.
    """
    saved: Any = getattr(metadata, "sharding", None)
    if not hasattr(saved, "partition_spec"):
        return None
    entries = (tuple(x) if isinstance(x, list) else x for x in saved.partition_spec)
    spec = PartitionSpec(*entries)
    try:
        return NamedSharding(saved.to_jax_sharding().mesh, spec)
    except ValueError:  # Orbax: the available devices are different
        sizes = tuple(int(size) for size in saved.shape)
        types = {} if saved.axis_types is None else {"axis_types": tuple(saved.axis_types)}
        return NamedSharding(AbstractMesh(sizes, tuple(saved.axis_names), **types), spec)


def array_metadata(folder: Path) -> dict[tuple[str, ...], Any]:
    """Returns Orbax's metadata of every array of a step, without reading it, by its key."""
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        return dict(flatten_dict(handler.metadata(item_folder(folder)).tree))


def tried(folder: Path, read: Callable[[], _T]) -> _T:
    """Makes errors of Orbax and TensorStore typed, unless they say nothing of the checkpoint."""
    try:
        return read()
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if "RESOURCE_EXHAUSTED" in text:
            raise
        raise damaged(folder, f"cannot be read: {text}") from error


def damaged(folder: Path, what: str) -> CheckpointError:
    """Returns the error of a checkpoint that is damaged, or was deleted meanwhile."""
    if not folder.is_dir():
        return MissingError(f"`{folder}` has been deleted while it was read")
    return DamagedError(f"`{folder}`: {what}")
