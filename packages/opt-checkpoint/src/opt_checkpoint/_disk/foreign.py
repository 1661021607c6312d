"""Checkpoints of Orbax that this package did not write, as sources of plans.

Such a checkpoint is a tree of arrays by path. What a leaf means, only the optimizer that wrote it
can say: its parameters, its state and its step are looked for as whole subtrees, wherever a program
has put them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from opt_core import flatten_with_paths

from opt_checkpoint._disk import storage as _storage
from opt_checkpoint._disk.foreign_layout import Found, find
from opt_checkpoint._disk.foreign_steps import ITEM_MARK, foreign_steps, is_orbax
from opt_checkpoint._disk.orbax import MANIFEST
from opt_checkpoint._disk.processes import together
from opt_checkpoint._naming.names import NamedState
from opt_checkpoint._naming.schema import LeafInfo, Names, Schema, Source
from opt_checkpoint._targets.named import named_view
from opt_checkpoint._targets.view import view_of
from opt_checkpoint.errors import DamagedError, ForeignError, LoadError, MissingError

_STEP = "state/step"
_HERE = "."  # the item of a folder that is one itself


@dataclasses.dataclass(frozen=True)
class ForeignStep:
    """A checkpoint of another program: a `Source` that a restore may come from.

    Attributes:
      path: the folder.
      schema: the leaves by the names that this package has for them.
      items: the tree of each item, as Orbax describes it, by the item's name.
      keys: where each leaf is, by name: the item's name, and the path in it.
      values: leaves that are not in the store.
    """

    path: Path
    schema: Schema
    items: Mapping[str, Any] = dataclasses.field(repr=False)
    keys: Mapping[str, Names] = dataclasses.field(repr=False)
    values: Mapping[str, Any] = dataclasses.field(repr=False)

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads leaves into where they are wanted; see `Source.read`."""
        infos = self.schema.by_name
        if unknown := sorted(wanted.keys() - infos.keys()):
            raise MissingError(f"`{self.path}` has no leaf `{unknown[0]}`: it has {len(infos)}")
        with together():
            stored = self._read({self.keys[n]: n for n in wanted if n in self.keys}, wanted)
        return {
            name: _leaf(infos[name], stored[name] if name in stored else self.values[name], place)
            for name, place in wanted.items()
        }

    def _read(
        self, names: Mapping[Names, str], wanted: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, Any]:
        stored: dict[str, Any] = {}
        for item, tree in self.items.items():
            paths = [(item, *path) for path, x in flatten_with_paths(tree) if x is not None]
            if not any(path in names for path in paths):
                continue
            leaves, structure = jax.tree.flatten(tree)
            template, restore_args = [], []
            for path, meta in zip(paths, leaves, strict=True):
                is_wanted = path in names
                template.append(_struct(meta) if is_wanted else ocp.PLACEHOLDER)
                place = wanted[names[path]] if is_wanted else None
                restore_args.append(_restore_args(meta, place))
            args = ocp.args.PyTreeRestore(
                item=jax.tree.unflatten(structure, template),
                restore_args=jax.tree.unflatten(structure, restore_args),
            )
            folder = _folder(self.path, item)
            read = _restore(folder, args)
            found = dict(zip(paths, jax.tree.leaves(read), strict=True))
            stored |= {name: found[path] for path, name in names.items() if path[0] == item}
        return stored


def open_foreign(path: str | Path, *, written_by: Any) -> Source:
    """Opens a checkpoint that another program wrote with Orbax, as a source of `plan_restore`.

    Checkpoints of `StandardCheckpointer`, `PyTreeCheckpointer` and `CheckpointManager` are read,
    with one item or several, of trees such as a `TrainState`, `nnx.state((model, optimizer))`,
    `(params, opt_state)` or a dictionary of them. The parameters, the state and the step of
    `written_by` are each looked for as a whole, under whatever keys: an index in place of a field,
    a `value` of NNX at the end, and integers that became strings are the same leaf. A step that is
    not there is the count that the state keeps. What belongs to none of them is `extra/<path>` in
    the schema.

    Args:
      path: the folder of a step, or of one item of it.
      written_by: the optimizer that wrote it, of any kind that `named_state` takes; its leaves may
        be abstract. Orbax does not say which one it was: this does.

    Returns:
      The source. Integers that count are read; arrays are when a plan is applied. There are no
      digests to compare.

    Raises:
      DamagedError: Orbax cannot read it.
      ForeignError: it does not hold what `written_by` has, or holds it twice; says what is.
      MissingError: there is no such folder.
      TypeError: `written_by` is of another kind.
    """
    folder = Path(path).absolute()
    view = view_of(written_by, argument="written_by")
    named = named_view(view)
    with together():
        items = {name: _metadata(_folder(folder, name)) for name in _items(folder)}
        keys = {
            (item, *names): meta
            for item, tree in items.items()
            for names, meta in flatten_with_paths(tree)
            if isinstance(meta, ocp.metadata.ArrayMetadata | ocp.metadata.ScalarMetadata)
        }
        found = find(folder, view, named, {key: tuple(m.shape) for key, m in keys.items()})
    return _with_counts(_opened(folder, items, keys, named, found))


def _opened(
    folder: Path,
    items: Mapping[str, Any],
    metadata: Mapping[Names, Any],
    named: NamedState,
    found: Found,
) -> ForeignStep:
    infos = [
        _info(info, metadata[found.keys[info.name]])
        for info in named.schema.leaves
        if info.name in found.keys
    ]
    keys = dict(found.keys)
    for key in found.rest:
        path = key[1:] if key[0] == _HERE else key
        shape, dtype = tuple(metadata[key].shape), str(metadata[key].dtype)
        info = LeafInfo(("extra", *path), shape, dtype, "extra")
        infos.append(info)
        keys[info.name] = key
    schema = dataclasses.replace(named.schema, leaves=tuple(infos), versions={})
    return ForeignStep(folder, schema, items, keys, {})


def _info(info: LeafInfo, meta: Any) -> LeafInfo:
    if info.is_key or info.name == _STEP or isinstance(meta, ocp.metadata.ScalarMetadata):
        return dataclasses.replace(info, value=None)
    return dataclasses.replace(info, dtype=str(meta.dtype), value=None)


def _with_counts(opened: ForeignStep) -> ForeignStep:
    """Reads the single integers of the state, and makes the step of them if it is not there."""
    infos = opened.schema.by_name
    counts = [
        info
        for info in infos.values()
        if info.kind == "state" and math.prod(info.shape) == 1 and _is_integer(info.dtype)
    ]
    device = SingleDeviceSharding(jax.local_devices()[0])
    places = {
        info.name: jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype), sharding=device)
        for info in counts
    }
    read = opened.read(places)
    values = {name: int(np.asarray(leaf).reshape(())) for name, leaf in read.items()}
    leaves = [
        dataclasses.replace(info, value=values.get(info.name)) for info in opened.schema.leaves
    ]
    made: dict[str, Any] = {}
    steps = {values[info.name] for info in counts if info.path[-1] == "count" and not info.shape}
    are_mini = any(info.path[-1] in ("mini_step", "gradient_step") for info in counts)
    if _STEP not in infos and len(steps) == 1 and not are_mini:
        (step,) = steps
        made[_STEP] = np.int32(step)
        info = LeafInfo(("state", "step"), (), "int32", "state", value=step)
        at = sum(leaf.kind == "params" for leaf in leaves)
        leaves.insert(at, info)
    schema = dataclasses.replace(opened.schema, leaves=tuple(leaves))
    return dataclasses.replace(opened, schema=schema, values=made)


def _is_integer(dtype: str) -> bool:
    return not dtype.startswith("key<") and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.integer))


def _items(folder: Path) -> list[str]:
    """The names of the items of a step; `.` for the folder itself."""
    if not folder.is_dir():
        raise MissingError(f"`{folder}` is not a folder")
    if (folder / MANIFEST).is_dir():
        raise ForeignError(f"`{folder}` is a step of opt-checkpoint: open it by `open_step`")
    if (folder / ITEM_MARK).is_file():
        return [_HERE]
    items = sorted(p.name for p in folder.iterdir() if (p / ITEM_MARK).is_file())
    if items and (is_orbax(folder) or not foreign_steps(folder)):
        return items
    if steps := foreign_steps(folder):
        shown = ", ".join(f"`{name}`" for name in steps[-5:])
        raise ForeignError(
            f"`{folder}` is a folder of steps: give one of them, such as `{folder / steps[-1]}`; "
            f"it has {shown}"
        )
    raise LoadError(f"`{folder}` is not a checkpoint of Orbax: no `{ITEM_MARK}` in it or below")


def _folder(folder: Path, item: str) -> Path:
    return folder if item == _HERE else folder / item


def _metadata(folder: Path) -> Any:
    return _try(folder, lambda f: _with_handler(lambda handler: handler.metadata(f).tree))


def _restore(folder: Path, args: Any) -> Any:
    return _try(folder, lambda f: _with_handler(lambda handler: handler.restore(f, args=args)))


def _with_handler(use: Callable[[Any], Any]) -> Any:
    handler = ocp.PyTreeCheckpointHandler()
    try:
        return use(handler)
    finally:
        handler.close()  # type: ignore[no-untyped-call]


def _try(folder: Path, read: Callable[[Path], Any]) -> Any:
    """Nothing raw leaves Orbax and TensorStore, but what says nothing about the step."""
    try:
        return read(folder)
    except MemoryError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if "RESOURCE_EXHAUSTED" in text:
            raise
        raise DamagedError(f"`{folder}` cannot be read: {text}") from error


def _struct(meta: Any) -> Any:
    return jax.ShapeDtypeStruct(tuple(meta.shape), meta.dtype)


def _restore_args(meta: Any, place: jax.ShapeDtypeStruct | None) -> Any:
    if place is None or not isinstance(meta, ocp.metadata.ArrayMetadata):
        return ocp.RestoreArgs()
    if jax.dtypes.canonicalize_dtype(meta.dtype) != meta.dtype:
        return ocp.RestoreArgs(restore_type=np.ndarray, dtype=meta.dtype)
    sharding: Any = place.sharding or SingleDeviceSharding(jax.local_devices()[0])
    if len(meta.shape) > len(place.shape):  # a PRNG key's words
        sharding = _storage.data_sharding(sharding, len(meta.shape))
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=tuple(meta.shape), dtype=meta.dtype)


def _leaf(info: LeafInfo, stored: Any, place: jax.ShapeDtypeStruct) -> Any:
    """The leaf, as the schema says: numbers become arrays, and the words of a key a key."""
    if info.is_key:
        if jnp.issubdtype(stored.dtype, jax.dtypes.prng_key):
            return stored
        return jax.random.wrap_key_data(stored, impl=_impl(info.dtype))
    if isinstance(stored, jax.Array) and str(stored.dtype) == info.dtype:
        return stored
    array = np.asarray(stored).astype(jnp.dtype(info.dtype))
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array
    return jnp.asarray(array) if place.sharding is None else jax.device_put(array, place.sharding)


def _impl(dtype: str) -> str:
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if str(jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype) == dtype:
            return impl
    raise LoadError(f"`{dtype}` is not a kind of PRNG keys that this JAX knows")
