"""Arrays as Orbax stores them: their keys, how they are read, where they were, its errors."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
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
from opt_core.errors import OptimizerError
from opt_core.extend import Names, is_wide

from opt_checkpoint._disk.manifest import item_folder
from opt_checkpoint.errors import DamagedError, LeafError, MissingError

_T = TypeVar("_T")


def store_key(path: Names) -> Names:
    """Returns the components of the key in the store: letters, digits, `_`, `-`, and `%` escapes.

    Examples:
      >>> store_key(('params', 'a.b', '../x', ''))
      ('params', 'a%2Eb', '%2E%2E%2Fx', '%')
    """
    return tuple(
        urllib.parse.quote(part, safe="", errors="surrogatepass")
        .replace(".", "%2E")
        .replace("~", "%7E")
        or "%"
        for part in path
    )


def nest(flat: Mapping[Names, Any]) -> dict[str, Any]:
    """Returns a nested dictionary; raises a `LeafError` if one key is the beginning of another."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        inner: Any = tree
        for part in path[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or path[-1] in inner:
            raise LeafError(
                f"`{'/'.join(path)}`: another leaf has the same name, or its name is the beginning "
                "of this one: rename one of them"
            )
        inner[path[-1]] = value
    return tree


def restore_arrays(folder: Path, item: Any, restore_args: Any) -> Any:
    """Reads some arrays of a step into the given shardings."""
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    with closing(ocp.PyTreeCheckpointHandler()) as handler:  # after a failure it cannot be reused
        return handler.restore(item_folder(folder), args=args)


def read_arrays(
    folder: Path, structs: Mapping[Names, Any], how: Mapping[Names, Any]
) -> dict[Names, Any]:
    """Reads some arrays of a step by their keys, as `restore_args` say; errors are typed."""
    nested = nest(structs), nest(how)
    return dict(flatten_dict(tried(folder, lambda: restore_arrays(folder, *nested))))


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
