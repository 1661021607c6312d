"""Checkpoints that this package did not write, as sources of plans.

Such a checkpoint is a tree of arrays by path, as Orbax or T5X writes it. Only the optimizer that
wrote it knows what a leaf means: its parameters, its state and its step are searched for as whole
subtrees, wherever they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from opt_core import Optimizer
from opt_core.extend import (
    LeafInfo,
    Names,
    Schema,
    View,
    abstract,
    children,
    listed,
    named_leaves,
    named_view,
    path_str,
    update_counts,
)

from opt_checkpoint._manifest import foreign_steps, is_orbax, item_with_manifest
from opt_checkpoint._processes import sync_errors
from opt_checkpoint._step import SavedStep, open_step, to_leaf, wanted_leaves
from opt_checkpoint._stores import Store, Stored, open_store
from opt_checkpoint._targets import view_of
from opt_checkpoint.errors import ForeignError, LoadError, MissingError

_HERE = "."  # the item of a folder that is itself one


# keys of the trained parameters, where there is a copy of them too
_PARAMS = ("params", "model", "target", "0")
_VALUE = ("value",)
STEP = "state/step"
_LISTED = 6


@dataclasses.dataclass(frozen=True)
class ForeignStep:
    """A checkpoint of another program: a `Source` that a restore may come from.

    Attributes:
      path: the folder.
      schema: the leaves by the names of this package.
      stores: the items of the checkpoint by name.
      keys: where each leaf is, by name: the item and the path in it. A step without one is what the
        state counts.
    """

    path: Path
    schema: Schema
    stores: Mapping[str, Store] = dataclasses.field(repr=False)
    keys: Mapping[str, Names] = dataclasses.field(repr=False)

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads leaves into the given shardings; see `Source.read`."""
        infos = wanted_leaves(self, wanted)
        derived = (name for name in wanted if name not in self.keys)
        stored: dict[str, Any] = {name: np.asarray(infos[name].value, np.int32) for name in derived}
        with sync_errors():
            for item, store in self.stores.items():
                at = {n: self.keys[n][1:] for n in wanted if self.keys.get(n, ("",))[0] == item}
                read = store.read({key: wanted[n].sharding for n, key in at.items()}) if at else {}
                for name, key in at.items():
                    stored[name] = read[key]
                    self._check_number(infos[name], read[key])
        return {n: to_leaf(infos[n], stored[n], place.sharding) for n, place in wanted.items()}

    def _check_number(self, info: LeafInfo, stored: Any) -> None:
        """Raises an error if what is to be an integer is none, or does not fit the dtype."""
        if not _is_integer(info.dtype) or str(getattr(stored, "dtype", "")) == info.dtype:
            return
        array = np.asarray(stored)
        if array.dtype.kind not in "iu" or not np.array_equal(array.astype(info.dtype), array):
            raise ForeignError(
                f"`{self.path}`: `{path_str(self.keys[info.name])}` is `{info.name}` of "
                f"`written_by`: expected {info.dtype}, found {stored}"
            )

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
        keys = find_keys(folder, view, schema.leaves, _leaves(stores))
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


def _is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


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
    steps, is_clear = update_counts(leaves)
    step = next(iter(steps.values()), None) if is_clear else None
    if step is not None and STEP not in counts:
        at = sum(leaf.kind == "params" for leaf in leaves)
        leaves.insert(at, LeafInfo(("state", "step"), (), "int32", "state", value=step))
    schema = dataclasses.replace(opened.schema, leaves=tuple(leaves))
    return dataclasses.replace(opened, schema=schema)


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


# Where a tree has the parameters, the state and the step of `written_by`


def find_keys(
    folder: Path, view: View, infos: Sequence[LeafInfo], leaves: Mapping[Names, Stored]
) -> dict[str, Names]:
    """Returns where a checkpoint, given by its leaves, has those of an optimizer."""
    left = set(leaves)
    state = [info.name for info in infos if info.kind == "state" and info.name != STEP]
    at, keys = _only(folder, "state", list(_state_paths(view.optimizer)), left)
    by_name = dict(zip(state, keys.values(), strict=True))
    left -= set(by_name.values())
    trained = [path for path, _ in named_leaves(view.optimizer.target)]
    names = {info.path[1:]: info.name for info in infos if info.kind == "params"}
    _, keys = _only(folder, "parameters", [[*trained, *view.others], trained], left, at)
    by_name |= {names[path]: key for path, key in keys.items()}
    left -= set(by_name.values())
    steps = _nearest([key for key in left if _is_step(key, leaves[key])], at)
    if len(steps) > 1:
        raise ForeignError(f"`{folder}`: several leaves may be the step: {_listed(sorted(steps))}")
    if steps:
        by_name[STEP] = steps[0]
    for info in infos:
        key = by_name.get(info.name)
        if key is not None and not info.is_key and leaves[key].shape != info.shape:
            raise ForeignError(
                f"`{folder}`: `{path_str(key)}` is `{info.name}` of `written_by`: expected "
                f"{list(info.shape)}, found {list(leaves[key].shape)}. Give the optimizer that "
                "wrote it, for the parameters that it had"
            )
    return by_name


def _state_paths(optimizer: Optimizer) -> Iterator[list[Names]]:
    """The paths of the leaves of a state: by fields, by positions, and as in a state dict."""
    state = optimizer.state.param_states
    yield [names for names, _ in named_leaves(state)]
    yield list(_indexed(state, ()))
    # In a state dict, groups share one tree by parameter: trace where each leaf goes.
    leaves, structure = jax.tree.flatten(optimizer.state)
    marks = [jax.ShapeDtypeStruct(np.shape(leaf), np.float32) for leaf in leaves]
    marked = optimizer.replace(state=jax.tree.unflatten(structure, marks))
    saved = marked.state_dict()["state"].get("param_states", {})
    places = {id(leaf): names for names, leaf in named_leaves(saved)}
    states = jax.tree.leaves(marked.state.param_states)
    if all(id(mark) in places for mark in states):
        yield [places[id(mark)] for mark in states]


def _indexed(node: Any, at: Names) -> Iterator[Names]:
    opened = children(node)
    if opened is None:
        if node is not None:
            yield at
        return
    is_record = isinstance(node, tuple)
    for i, (name, child) in enumerate(opened.children):
        yield from _indexed(child, (*at, str(i) if is_record else name))


def _only(
    folder: Path, what: str, choices: Sequence[Sequence[Names]], left: set[Names], near: Names = ()
) -> tuple[Names, Mapping[Names, Names]]:
    """The first choice of leaves that is found, nearest to another place: its place and keys."""
    if not choices[0]:
        return (), {}
    for paths in choices:
        parts = _parts(paths, left)
        places = _nearest(list(parts), near)
        for name in _PARAMS if len(places) > 1 else ():
            if preferred := [place for place in places if place[-1:] == (name,)]:
                places = preferred
                break
        if len(places) == 1:
            return places[0], parts[places[0]]
        if places:
            raise ForeignError(
                f"`{folder}`: the {what} of `written_by` may be any of {_listed(places)}: open the "
                "folder of one item, if they are several"
            )
    raise ForeignError(
        f"`{folder}` does not hold the {what} of `written_by`: "
        f"{_nearly(min(choices, key=len), left)}. Give the optimizer that wrote it"
    )


def _parts(paths: Sequence[Names], left: set[Names]) -> dict[Names, dict[Names, Names]]:
    """The places that hold exactly these leaves, with the keys by path."""
    by_path = {key[:-1]: key for key in left if key[-1:] == _VALUE} | {key: key for key in left}
    parts = {}
    for prefix in sorted(_prefixes(paths[0], by_path)):
        keys = {path: by_path[at] for path in paths if (at := (*prefix, *path)) in by_path}
        inside = sum(key[: len(prefix)] == prefix for key in left)
        if len(keys) == len(paths) == inside:
            parts[prefix] = keys
    return parts


def _prefixes(path: Names, keys: Iterable[Names]) -> set[Names]:
    """What precedes a path in the keys that end with it."""
    ends = {key: len(key) - len(path) for key in keys}
    return {key[:end] for key, end in ends.items() if end >= 0 and key[end:] == path}


def _nearest(keys: Sequence[Names], near: Names) -> list[Names]:
    """Those that share the longest prefix with another place."""
    lengths = range(len(near) + 1)
    shared = {key: max(n for n in lengths if key[:n] == near[:n]) for key in keys}
    return [key for key in keys if shared[key] == max(shared.values())]


def _nearly(paths: Sequence[Names], left: set[Names]) -> str:
    """What is missing and what is extra at the place that has most of them."""
    bare = {key[:-1] if key[-1:] == _VALUE else key for key in left}
    places = sorted({place for path in paths for place in _prefixes(path, bare)}) or [()]
    missing = {
        place: [x for path in paths if (x := (*place, *path)) not in bare] for place in places
    }
    place = min(places, key=lambda place: len(missing[place]))
    if gone := missing[place]:
        return f"at `{path_str(place)}` expected {_listed(gone)}, found nothing there"
    more = {key for key in bare if key[: len(place)] == place} - {(*place, *x) for x in paths}
    return f"at `{path_str(place)}` found {_listed(sorted(more))} too"


def _listed(paths: Sequence[Names]) -> str:
    shown = listed(map(path_str, paths[:_LISTED]))
    return f"{shown} and {len(paths) - _LISTED} more" if len(paths) > _LISTED else shown


def _is_step(key: Names, leaf: Stored) -> bool:
    """Whether a leaf may be the step: an integer of that name, or at a position in a tuple."""
    if leaf.shape or not _is_integer(leaf.dtype):
        return False
    last = key[-2] if key[-1:] == _VALUE and len(key) > 1 else key[-1]
    return last == "step" or last.isdecimal()
