"""Trees that other programs wrote, as Orbax and T5X store them: what is there, and reading it.

Each device reads its own share. Errors of Orbax and TensorStore are typed.
"""

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
from jax.sharding import Sharding
from opt_core.extend import Names, is_wide, named_leaves

from opt_checkpoint._manifest import INDEX, ITEM_MARK
from opt_checkpoint._read_legacy import PLACEHOLDER, is_elsewhere, read_legacy
from opt_checkpoint._step import (
    default_device,
    restore_args,
    restore_arrays,
    saved_shardings,
    tried,
)
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
        return jax.make_array_from_callback(stored.shape, sharding or default_device(), part)


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
