"""Arrays as Orbax reads them: into which shardings, where they were, its errors."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from opt_core.errors import OptimizerError
from opt_core.extend import Names, is_wide

from opt_checkpoint._folder import item_folder
from opt_checkpoint.errors import DamagedError, MissingError

_T = TypeVar("_T")
_Key = TypeVar("_Key")


def restore_arrays(folder: Path, item: Any, restore_args: Any, *, is_partial: bool = True) -> Any:
    """Reads arrays as `restore_args` say; of a partial `item`, a nested dict, only those in it."""
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=is_partial)
    with closing(ocp.PyTreeCheckpointHandler()) as handler:  # after a failure it cannot be reused
        return handler.restore(item_folder(folder), args=args)


def tree_metadata(folder: Path) -> Any:
    """Returns Orbax's metadata of every array of a step, in its tree; errors are typed."""
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        return tried(folder, lambda: handler.metadata(item_folder(folder)).tree)


def restore_args(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Any:
    """Returns how to read an array; a dtype of `None` is that of the store."""
    if dtype is not None and is_wide(dtype):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    place = sharding or SingleDeviceSharding(jax.local_devices()[0])
    return ocp.ArrayRestoreArgs(sharding=place, global_shape=shape, dtype=dtype)


def data_sharding(sharding: Sharding | None, rank: int) -> Sharding | None:
    """Returns the sharding of the data of PRNG keys: the words of a key are not split."""
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*sharding.spec, *(None,) * (rank - len(sharding.spec)))
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding


def placed(array: np.ndarray[Any, Any], sharding: Sharding | None) -> Any:
    """Returns it as a JAX array, if JAX can hold it."""
    if is_wide(array.dtype):
        return array
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def saved_shardings(folder: Path, keys: Mapping[_Key, Names]) -> dict[_Key, Sharding]:
    """Returns where arrays were on a mesh, from the file where Orbax notes it by their keys.

    Orbax's own reader opens every array, and this file once for each (Orbax 0.12).
    """
    file = item_folder(folder) / "_sharding"

    def read() -> dict[_Key, Sharding]:
        texts: dict[str, str] = json.loads(file.read_bytes()) if file.is_file() else {}
        saved = {text: json.loads(text) for text in set(texts.values()) if text}
        places = {
            text: _sharding(ocp.metadata.NamedShardingMetadata.from_deserialized_dict(data))
            for text, data in saved.items()
            if data["sharding_type"] == "NamedSharding"
        }
        by_name = {base64.urlsafe_b64decode(x).decode(): places.get(texts[x]) for x in texts}
        shardings = {key: by_name.get(".".join(names)) for key, names in keys.items()}
        return {key: place for key, place in shardings.items() if place is not None}

    return tried(folder, read)


def _sharding(saved: Any) -> NamedSharding:
    """A sharding of Orbax's metadata; on devices that are not here, of an `AbstractMesh`."""
    # of JSON, which has no tuples
    entries = (x if x is None or isinstance(x, str) else tuple(x) for x in saved.partition_spec)
    spec = PartitionSpec(*entries)
    try:
        return NamedSharding(saved.to_jax_sharding().mesh, spec)
    except ValueError:  # Orbax: the available devices are different
        sizes = tuple(int(size) for size in saved.shape)
        types = {} if saved.axis_types is None else {"axis_types": tuple(saved.axis_types)}
        return NamedSharding(AbstractMesh(sizes, tuple(saved.axis_names), **types), spec)


def tried(folder: Path, read: Callable[[], _T]) -> _T:
    """Makes errors of Orbax and TensorStore typed, unless they say nothing of the checkpoint."""
    try:
        return read()
    except (MemoryError, OptimizerError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if "RESOURCE_EXHAUSTED" in text:
            raise
        raise damaged(folder, f"cannot be read: {text}") from error


def damaged(folder: Path, what: str) -> OptimizerError:
    """Returns the error of a checkpoint that is damaged, or was deleted meanwhile."""
    if not folder.is_dir():
        return MissingError(f"`{folder}` has been deleted while it was read")
    return DamagedError(f"`{folder}`: {what}")
