"""Where a tree that another program saved has the parameters, the state and the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from opt_core import Optimizer
from opt_core.extend import LeafInfo, Names, View, children, listed, named_leaves, path_str

from opt_checkpoint.errors import ForeignError

# keys of the trained parameters, where there is a copy of them too
_PARAMS = ("params", "model", "target", "0")
_VALUE = ("value",)
STEP = "state/step"
_LISTED = 6


def find_keys(
    folder: Path, view: View, infos: Sequence[LeafInfo], shapes: Mapping[Names, tuple[int, ...]]
) -> dict[str, Names]:
    """Returns where a checkpoint, given by shapes and keys, has the leaves of an optimizer."""
    left = set(shapes)
    state = [info.name for info in infos if info.kind == "state" and info.name != STEP]
    at, keys = _only(folder, "state", list(_state_paths(view.optimizer)), left)
    by_name = dict(zip(state, keys.values(), strict=True))
    left -= set(by_name.values())
    trained = [path for path, _ in named_leaves(view.optimizer.target)]
    names = {info.path[1:]: info.name for info in infos if info.kind == "params"}
    _, keys = _only(folder, "parameters", [[*trained, *view.others], trained], left, at)
    by_name |= {names[path]: key for path, key in keys.items()}
    left -= set(by_name.values())
    steps = _nearest([key for key in left if shapes[key] == () and _is_step(key)], at)
    if len(steps) > 1:
        raise ForeignError(f"`{folder}`: several leaves may be the step: {_listed(sorted(steps))}")
    if steps:
        by_name[STEP] = steps[0]
    for info in infos:
        key = by_name.get(info.name)
        if key is not None and not info.is_key and shapes[key] != info.shape:
            raise ForeignError(
                f"`{folder}`: `{path_str(key)}` is `{info.name}` of `written_by`: expected "
                f"{list(info.shape)}, found {list(shapes[key])}. Give the optimizer that wrote it, "
                "for the parameters that it had"
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
    wanted = {
        place: {(*place, *path) for path in paths}
        for place in set[Names]().union(*(_prefixes(path, bare) for path in paths)) or {()}
    }
    place = min(sorted(wanted), key=lambda place: len(wanted[place] - bare))
    gone = sorted(wanted[place] - bare)
    extra = sorted({key for key in bare if key[: len(place)] == place} - wanted[place])
    parts = [f"expected {_listed(gone)}, found nothing there"] if gone else []
    parts += [f"found {_listed(extra)} too"] if extra else []
    return f"at `{path_str(place)}` " + ", and ".join(parts)


def _listed(paths: Sequence[Names]) -> str:
    shown = listed(map(path_str, paths[:_LISTED]))
    return f"{shown} and {len(paths) - _LISTED} more" if len(paths) > _LISTED else shown


def _is_step(key: Names) -> bool:
    """Whether a number may be the step: it has that name, or a position in a tuple."""
    last = key[-2] if key[-1:] == _VALUE and len(key) > 1 else key[-1]
    return last == "step" or last.isdecimal()
