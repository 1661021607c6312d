"""What another program stored: a tree of arrays by path, as Orbax or T5X writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Sharding, SingleDeviceSharding
from opt_core.extend import Names, is_wide, named_leaves

from opt_checkpoint._disk.manifest import ITEM_MARK
from opt_checkpoint._disk.orbax import restore_args, sharding_of, tried
from opt_checkpoint._disk.steps import INDEX
from opt_checkpoint._legacy.layouts import PLACEHOLDER, is_elsewhere
from opt_checkpoint._legacy.read import read_legacy
from opt_checkpoint.errors import LoadError


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
        with closing(ocp.PyTreeCheckpointHandler()) as handler:
            return tried(self.folder, lambda: handler.metadata(self.folder).tree)

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
        places = {names: sharding_of(metadata) for names, metadata in named_leaves(self._tree)}
        return {names: place for names, place in places.items() if place is not None}

    def read(self, wanted: Mapping[Names, Sharding | None]) -> dict[Names, Any]:
        """Reads with Orbax: each device its share; what is left out has to keep its container."""
        metas, structure = jax.tree.flatten(self._tree)
        paths = [names for names, _ in named_leaves(self._tree)]
        items = [
            jax.ShapeDtypeStruct(tuple(m.shape), m.dtype) if names in wanted else ocp.PLACEHOLDER
            for names, m in zip(paths, metas, strict=True)
        ]
        places = [
            self._restore_args(names, wanted[names]) if names in wanted else ocp.RestoreArgs()
            for names in paths
        ]
        args = ocp.args.PyTreeRestore(
            item=jax.tree.unflatten(structure, items),
            restore_args=jax.tree.unflatten(structure, places),
        )
        with closing(ocp.PyTreeCheckpointHandler()) as handler:
            read = tried(self.folder, lambda: handler.restore(self.folder, args=args))
        leaves = zip(paths, jax.tree.leaves(read), strict=True)
        return {names: leaf for names, leaf in leaves if names in wanted}

    def _restore_args(self, names: Names, sharding: Sharding | None) -> Any:
        shape, dtype, is_number = self.leaves[names]
        if is_number:
            return ocp.RestoreArgs()
        known = None if dtype.startswith("key<") else jnp.dtype(dtype)
        return restore_args(shape, known, sharding)


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
            return Stored(
                np.shape(leaf), str(np.asarray(leaf).dtype), isinstance(leaf, int | float)
            )
        if leaf.dtype.name == "uint16":
            raise LoadError(
                f"`{self.folder}`: `{'/'.join(names)}` is uint16, which is how T5X stored bfloat16 "
                "before version 3. Convert it with T5X"
            )
        return Stored(leaf.shape, leaf.dtype.name)

    def read(self, wanted: Mapping[Names, Sharding | None]) -> dict[Names, Any]:
        """Reads with TensorStore: each device its share."""
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
        place = sharding or SingleDeviceSharding(jax.local_devices()[0])
        return jax.make_array_from_callback(stored.shape, place, part)


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
