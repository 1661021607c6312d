"""Arrays on the disk, as Orbax and T5X store them: what is there, and reading it.

Each device reads its own share. Errors of Orbax and TensorStore are typed.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import (
    AbstractMesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from opt_core.errors import OptimizerError
from opt_core.extend import LeafInfo, Names, is_wide, named_leaves

from opt_checkpoint._folder import INDEX, ITEM_MARK, item_folder
from opt_checkpoint._manifest import key_impl
from opt_checkpoint._read_legacy import PLACEHOLDER, is_elsewhere, read_legacy
from opt_checkpoint.errors import DamagedError, LoadError, MissingError

_T = TypeVar("_T")
_Key = TypeVar("_Key")


def restore_arrays(folder: Path, item: Any, restore_args: Any, *, is_partial: bool = True) -> Any:
    """Reads arrays as `restore_args` say; of a partial `item`, a nested dict, only those in it."""
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=is_partial)
    with closing(ocp.PyTreeCheckpointHandler()) as handler:  # after a failure it cannot be reused
        return tried(folder, lambda: handler.restore(item_folder(folder), args=args))


def tree_metadata(folder: Path) -> Any:
    """Returns Orbax's metadata of every array of a step, in its tree."""
    with closing(ocp.PyTreeCheckpointHandler()) as handler:
        return tried(folder, lambda: handler.metadata(item_folder(folder)).tree)


def restore_args(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Any:
    """Returns how to read what is stored of a leaf; a dtype of `None` is that of the store."""
    if dtype is not None and is_wide(dtype):
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    # Of PRNG keys, whose words are one more dimension, the sharding leaves that dimension together.
    place = sharding or _default_device()
    return ocp.ArrayRestoreArgs(sharding=place, global_shape=shape, dtype=dtype)


def _default_device() -> Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def to_leaf(info: LeafInfo, stored: Any, sharding: Sharding | None) -> Any:
    """Returns the leaf of what is stored of it: words become PRNG keys, and numbers arrays."""
    if info.is_key:
        if jnp.issubdtype(stored.dtype, jax.dtypes.prng_key):
            return stored
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=key_impl(info.dtype))
    if isinstance(stored, jax.Array) and str(stored.dtype) == info.dtype:
        return stored
    array = np.asarray(stored).astype(jnp.dtype(info.dtype), copy=False)
    if is_wide(array.dtype):  # JAX cannot hold it
        return array
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def saved_shardings(folder: Path, keys: Mapping[_Key, Names]) -> dict[_Key, Sharding]:
    """Returns where arrays were on a mesh, by their keys in the store."""
    # Orbax's own reader opens every array, and this file once for each (Orbax 0.12).
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


# Trees that other programs wrote


class Stored(NamedTuple):
    """Shape and dtype of a leaf, and whether it was a Python number, whose dtype is arbitrary."""

    shape: tuple[int, ...]
    dtype: str
    is_number: bool = False


@dataclasses.dataclass(frozen=True)
class OrbaxTree:
    """A tree that Orbax wrote, with its description."""

    folder: Path

    @cached_property
    def _tree(self) -> Any:
        return tree_metadata(self.folder)

    @cached_property
    def leaves(self) -> Mapping[Names, Stored]:
        """Arrays and numbers; strings and empty nodes are left out."""
        kinds = ocp.metadata.ArrayMetadata, ocp.metadata.ScalarMetadata
        return {
            names: Stored(tuple(m.shape), str(m.dtype), isinstance(m, kinds[1]))
            for names, m in named_leaves(self._tree)
            if isinstance(m, kinds)
        }

    @cached_property
    def shardings(self) -> Mapping[Names, Sharding]:
        """Where arrays were on a mesh."""
        return saved_shardings(self.folder, {names: names for names in self.leaves})

    def read(self, wanted: Mapping[Names, Sharding | None]) -> dict[Names, Any]:
        """Reads with Orbax; what is left out has to keep its container."""
        structure = jax.tree.structure(self._tree)
        paths = [names for names, _ in named_leaves(self._tree)]
        how = [
            self._restore_args(n, wanted[n]) if n in wanted else ocp.RestoreArgs() for n in paths
        ]
        items = [x if n in wanted else ocp.PLACEHOLDER for n, x in zip(paths, how, strict=True)]
        trees = jax.tree.unflatten(structure, items), jax.tree.unflatten(structure, how)
        read = restore_arrays(self.folder, *trees, is_partial=False)
        leaves = zip(paths, jax.tree.leaves(read), strict=True)
        return {names: leaf for names, leaf in leaves if names in wanted}

    def _restore_args(self, names: Names, sharding: Sharding | None) -> Any:
        shape, dtype, is_number = self.leaves[names]
        if is_number:
            return ocp.RestoreArgs()
        return restore_args(shape, None if dtype.startswith("key<") else jnp.dtype(dtype), sharding)


@dataclasses.dataclass(frozen=True)
class IndexedArrays:
    """A msgpack file, and next to it a TensorStore folder for each array: T5X's own layout.

    Orbax 0.1, which did not describe its trees yet, wrote the same with other folder names.
    """

    folder: Path
    shardings: ClassVar[Mapping[Names, Sharding]] = {}  # T5X noted none

    @cached_property
    def _contents(self) -> Mapping[Names, Any]:
        """Numbers and arrays in the file, and open stores of those next to it."""
        entries = dict(_flat(read_legacy(self.folder / INDEX), ()))
        stores = {
            names: ts.open(
                {"driver": "zarr", "kvstore": {"driver": "file", "path": str(self.folder / leaf)}},
                open=True,
                read=True,
            )
            for names, leaf in entries.items()
            if isinstance(leaf, str)
        }
        return entries | {n: tried(self.folder, store.result) for n, store in stores.items()}

    @cached_property
    def leaves(self) -> Mapping[Names, Stored]:
        """Arrays in the file and next to it."""
        return {names: self._stored(names, leaf) for names, leaf in self._contents.items()}

    def _stored(self, names: Names, leaf: Any) -> Stored:
        if not isinstance(leaf, ts.TensorStore):
            array = np.asarray(leaf)
            return Stored(array.shape, str(array.dtype), isinstance(leaf, int | float))
        if leaf.dtype.name == "uint16":
            raise LoadError(
                f"`{self.folder}`: `{'/'.join(names)}` is uint16, which is how T5X stored bfloat16 "
                "before version 3. Convert it with T5X"
            )
        return Stored(leaf.shape, leaf.dtype.name)

    def read(self, wanted: Mapping[Names, Sharding | None]) -> dict[Names, Any]:
        """Reads with TensorStore."""
        return tried(
            self.folder,
            lambda: {names: self._read(names, place) for names, place in wanted.items()},
        )

    def _read(self, names: Names, sharding: Sharding | None) -> Any:
        stored, leaf = self.leaves[names], self._contents[names]

        def part(index: Any) -> Any:
            is_store = isinstance(leaf, ts.TensorStore)
            return leaf[index].read().result() if is_store else np.asarray(leaf)[index]

        if stored.is_number or is_wide(jnp.dtype(stored.dtype)):
            return part(...)
        return jax.make_array_from_callback(stored.shape, sharding or _default_device(), part)


Store = OrbaxTree | IndexedArrays


def open_store(folder: Path) -> Store | None:
    """Opens the folder of an item of a checkpoint; `None` if it is not in a known format."""
    if (folder / ITEM_MARK).is_file():
        return OrbaxTree(folder)
    return IndexedArrays(folder) if (folder / INDEX).is_file() else None


def _flat(node: Any, at: Names) -> Iterator[tuple[Names, Any]]:
    """The leaves of an index: numbers, arrays, and names of folders."""
    if is_elsewhere(node):
        yield at, _subfolder(node)
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _flat(child, (*at, str(key)))
    elif isinstance(node, bool | int | float | np.ndarray | np.generic):
        yield at, node


def _subfolder(leaf: Any) -> str:
    """The folder next to the file that an entry names, whatever path it recorded."""
    if isinstance(leaf, Mapping):
        kvstore = leaf["kvstore"]  # in buckets, the path was outside of it
        path = leaf.get("path") or (kvstore.get("path") if isinstance(kvstore, Mapping) else None)
    else:
        path = leaf.removeprefix(PLACEHOLDER)
    name = Path(str(path)).name
    if name in ("", ".."):
        raise LoadError(f"`{path!s:.80}` is not the folder of an array")
    return name
