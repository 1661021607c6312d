"""Checkpoints that this package did not write, as sources of plans.

Such a checkpoint is a tree of arrays by path, as Orbax or T5X writes it. Only the optimizer that
wrote it knows what a leaf means: its parameters, its state and its step are searched for as whole
subtrees, wherever they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Sharding, SingleDeviceSharding
from opt_core.extend import (
    LeafInfo,
    Names,
    Schema,
    abstract,
    is_wide,
    key_kind,
    named_leaves,
    named_view,
    update_counts,
)

from opt_checkpoint._folder import INDEX, ITEM_MARK, foreign_steps, is_orbax, item_with_manifest
from opt_checkpoint._foreign_keys import STEP, find_keys
from opt_checkpoint._processes import sync_errors
from opt_checkpoint._read_legacy import PLACEHOLDER, is_elsewhere, read_legacy
from opt_checkpoint._step import (
    SavedStep,
    data_sharding,
    known_leaves,
    open_step,
    placed,
    restore_args,
    restore_arrays,
    saved_shardings,
    tree_metadata,
    tried,
)
from opt_checkpoint._targets import view_of
from opt_checkpoint.errors import ForeignError, LoadError, MissingError

_HERE = "."  # the item of a folder that is itself one


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
        """Reads with Orbax: each device its share; what is left out has to keep its container."""
        structure = jax.tree.structure(self._tree)
        paths = [names for names, _ in named_leaves(self._tree)]
        how = [
            self._restore_args(n, wanted[n]) if n in wanted else ocp.RestoreArgs() for n in paths
        ]
        items = [x if n in wanted else ocp.PLACEHOLDER for n, x in zip(paths, how, strict=True)]
        trees = jax.tree.unflatten(structure, items), jax.tree.unflatten(structure, how)
        read = tried(self.folder, lambda: restore_arrays(self.folder, *trees, is_partial=False))
        leaves = zip(paths, jax.tree.leaves(read), strict=True)
        return {names: leaf for names, leaf in leaves if names in wanted}

    def _restore_args(self, names: Names, sharding: Sharding | None) -> Any:
        shape, dtype, is_number = self.leaves[names]
        if is_number:
            return ocp.RestoreArgs()
        numeric = None if dtype.startswith("key<") else jnp.dtype(dtype)
        return restore_args(shape, numeric, sharding)


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


@dataclasses.dataclass(frozen=True)
class ForeignStep:
    """A checkpoint of another program: a `Source` that a restore may come from.

    Attributes:
      path: the folder.
      schema: the leaves by the names of this package.
      stores: the items of the checkpoint by name.
      keys: where each leaf is, by name: the item and the path in it.
      derived: leaves that are not stored, by name.
    """

    path: Path
    schema: Schema
    stores: Mapping[str, Store] = dataclasses.field(repr=False)
    keys: Mapping[str, Names] = dataclasses.field(repr=False)
    derived: Mapping[str, Any] = dataclasses.field(repr=False, default_factory=dict)

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads leaves into the given shardings; see `Source.read`."""
        infos = known_leaves(self, wanted)
        stored = dict(self.derived)
        with sync_errors():
            for item, store in self.stores.items():
                at = {n: self.keys[n][1:] for n in wanted if self.keys.get(n, ("",))[0] == item}
                places = {at[n]: _sharding(store.leaves[at[n]], wanted[n]) for n in at}
                read = store.read(places) if places else {}
                stored |= {name: read[key] for name, key in at.items()}
        return {name: _leaf(infos[name], stored[name], place) for name, place in wanted.items()}

    def same(self, names: Iterable[str]) -> bool | None:
        """Returns whether leaves are the same, bit for bit; `None` of other leaves than counts."""
        counts = {self.schema.by_name[name].value for name in names}
        return None if None in counts else len(counts) == 1

    def shardings(self, names: Iterable[str]) -> dict[str, Sharding]:
        """Returns where leaves were when they were saved, by name, as far as it is known."""
        keys = {name: self.keys[name] for name in names if name in self.keys}
        places = {name: self.stores[key[0]].shardings.get(key[1:]) for name, key in keys.items()}
        return {name: place for name, place in places.items() if place is not None}


def open_foreign(path: str | Path, *, written_by: Any = None) -> ForeignStep | SavedStep:
    """Opens a checkpoint that another program wrote, as a source of `plan_restore`.

    Checkpoints of Orbax (`StandardCheckpointer`, `PyTreeCheckpointer`, `CheckpointManager`, Orbax
    v1) and T5X's own are read, with one item or several, of trees such as a `TrainState`,
    `nnx.state((model, optimizer))`, `(params, opt_state)` or a dictionary of them. The parameters,
    the state and the step of `written_by` are each searched for as a whole, under any keys: an
    index in place of a field, a `value` of NNX at the end, integers that became strings, and the
    state dicts of Flax and T5X are the same leaves. A missing step is the count that the state
    keeps. All other leaves are `extra/<path>` in the schema.

    Args:
      path: the folder of a step, or of one item of it.
      written_by: the optimizer that wrote it, of any kind that `named_state` takes; its leaves may
        be abstract. Orbax does not record it. Not needed for what `OptimizerHandler` or a
        `Checkpointer` wrote.

    Returns:
      The source. Counts are read now, arrays when a plan is applied. Only a `SavedStep`, which a
      checkpoint with a manifest is, has digests to compare.

    Raises:
      DamagedError: it cannot be read.
      ForeignError: it does not hold what `written_by` has, or holds it twice; says what it holds.
        Or it has no manifest, and there is no `written_by`.
      LoadError: it is not a checkpoint.
      MissingError: the folder does not exist.
      TypeError: `written_by` is of another kind.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise MissingError(f"`{folder}` is not a folder")
    if item_with_manifest(folder) is not None:
        return open_step(folder)
    if written_by is None:
        raise ForeignError(f"`{folder}` does not say which optimizer wrote it: give `written_by=`")
    view = view_of(written_by, argument="written_by")
    schema = named_view(view).schema
    with sync_errors():
        stores = _stores(folder)
        shapes = {key: leaf.shape for key, leaf in _leaves(stores).items()}
        keys = find_keys(folder, view, schema.leaves, shapes)
    return _with_counts(_opened(folder, stores, schema, keys, under=("extra",)))


def open_tree(folder: Path) -> ForeignStep:
    """Opens a checkpoint as leaves by path, without their meaning."""
    return _opened(folder, _stores(folder), Schema(()), {}, under=())


def _opened(
    folder: Path,
    stores: Mapping[str, Store],
    schema: Schema,
    keys: Mapping[str, Names],
    *,
    under: Names,
) -> ForeignStep:
    leaves, by_name, taken = _leaves(stores), dict(keys), set(keys.values())
    infos = [_info(x, leaves[keys[x.name]]) for x in schema.leaves if x.name in keys]
    for key in (key for key in leaves if key not in taken):
        path = key[1:] if key[0] == _HERE else key
        infos.append(LeafInfo((*under, *path), leaves[key].shape, leaves[key].dtype, "extra"))
        by_name[infos[-1].name] = key
    schema = dataclasses.replace(schema, leaves=tuple(infos), versions={})
    return ForeignStep(folder, schema, stores, by_name)


def _info(info: LeafInfo, stored: Stored) -> LeafInfo:
    is_stored_so = not (info.is_key or info.name == STEP or stored.is_number)
    return dataclasses.replace(info, dtype=stored.dtype if is_stored_so else info.dtype, value=None)


def _with_counts(opened: ForeignStep) -> ForeignStep:
    """Reads the counts of the state, and derives the step from them if it is missing."""
    counts = {
        info.name: info
        for info in opened.schema.leaves
        if info.kind == "state" and math.prod(info.shape) == 1
        if not info.is_key and jnp.issubdtype(jnp.dtype(info.dtype), jnp.integer)
    }
    read = opened.read({name: abstract(info) for name, info in counts.items()})
    values = {name: int(np.asarray(leaf).reshape(())) for name, leaf in read.items()}
    leaves = [dataclasses.replace(x, value=values.get(x.name)) for x in opened.schema.leaves]
    derived: dict[str, Any] = {}
    steps, is_clear = update_counts(leaves)
    step = next(iter(steps.values()), None) if is_clear else None
    if step is not None and STEP not in counts:
        derived[STEP] = np.int32(step)
        at = sum(leaf.kind == "params" for leaf in leaves)
        leaves.insert(at, LeafInfo(("state", "step"), (), "int32", "state", value=step))
    schema = dataclasses.replace(opened.schema, leaves=tuple(leaves))
    return dataclasses.replace(opened, schema=schema, derived=derived)


def _stores(folder: Path) -> dict[str, Store]:
    """The items of a step by name; `.` for the folder itself."""
    if (store := open_store(folder)) is not None:
        return {_HERE: store}
    items = {path.name: open_store(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    stores = {name: store for name, store in items.items() if store is not None}
    steps = foreign_steps(folder)
    if stores and (is_orbax(folder) or not steps):
        return stores
    if steps:
        shown = ", ".join(f"`{name}`" for name in steps[-5:])
        raise ForeignError(
            f"`{folder}` is a folder of steps: give one of them, such as `{folder / steps[-1]}`; "
            f"it has {shown}"
        )
    raise LoadError(f"`{folder}` is not a checkpoint of Orbax or T5X")


def _leaves(stores: Mapping[str, Store]) -> dict[Names, Stored]:
    return {
        (item, *at): leaf for item, store in stores.items() for at, leaf in store.leaves.items()
    }


def _sharding(stored: Stored, place: jax.ShapeDtypeStruct) -> Any:
    """The sharding of what is stored; the words of a PRNG key are not split."""
    is_longer = len(stored.shape) > len(place.shape)
    return data_sharding(place.sharding, len(stored.shape)) if is_longer else place.sharding


def _leaf(info: LeafInfo, stored: Any, place: jax.ShapeDtypeStruct) -> Any:
    """The leaf as the schema has it: numbers become arrays, and words of keys become keys."""
    if info.is_key:
        if jnp.issubdtype(stored.dtype, jax.dtypes.prng_key):
            return stored
        return jax.random.wrap_key_data(stored, impl=key_kind(info.dtype)[0])
    if isinstance(stored, jax.Array) and str(stored.dtype) == info.dtype:
        return stored
    return placed(np.asarray(stored).astype(jnp.dtype(info.dtype)), place.sharding)
