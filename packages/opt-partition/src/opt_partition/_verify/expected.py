"""The expected sharding of a compiled step, and where its parameters and state are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, Sharding

from opt_partition._align import align
from opt_partition._layout import Layout
from opt_partition._trees import children, key_name, leaves_with_paths, split_path
from opt_partition.errors import AxesError

Role = Literal["params", "state", "other"]
# One string per key, as keys may contain the `/` that joins them in messages.
Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Expected:
    """The expected sharding of a compiled step.

    `inputs` and `outputs` have the structure of the step's arguments and result, or are prefixes of
    it. In place of a tree they contain a `Layout`, a tree of shardings, a tree of (abstract)
    arrays, a single sharding for all leaves, or `None` for any sharding. Layouts and arrays also
    specify dtypes. Trailing arguments and results can be omitted. Static arguments are not part of
    a compiled step and are not counted.

    Attributes:
      inputs: expected positional arguments, e.g. `(params_layout, state_layout)`.
      outputs: expected result, e.g. `(params_layout, state_layout)`.
      params: path of the parameters in the arguments, e.g. `'0/target'` for `f(optimizer, batch)`,
        or `'params'` for `f(*, params, state)`.
      state: path of the optimizer state in the arguments, e.g. `'0/state'`.
      keywords: expected keyword arguments by name, e.g. `{'state': state_layout}`; omitted ones are
        not checked, which is noted in the report.
    """

    inputs: Any
    outputs: Any
    params: str = "0"
    state: str = "1"
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The expectation for one leaf; `None` means any sharding or dtype."""

    sharding: Sharding | None = None
    dtype: Any = None


def broadcast(prefix: Any, tree: Any, where: str) -> list[Asked]:
    """Returns the expectation of a prefix of the step's tree, e.g. its `inputs`, for each leaf."""
    if isinstance(prefix, tuple | list) and isinstance(tree, tuple):
        prefix = (*prefix, *[None] * (len(tree) - len(prefix)))
    shapes = jax.tree.map(
        lambda node: node.shapes if isinstance(node, Layout) else node,
        prefix,
        is_leaf=lambda node: isinstance(node, Layout),
    )
    try:
        entries = align(shapes, tree, where, prefix=True)
    except AxesError as error:
        raise AxesError(f"{error}\nUse `None` for what is not checked.") from None
    paths = (f"{where}/{path}" for path, _ in leaves_with_paths(tree))
    return list(map(_asked, entries, jax.tree.leaves(tree), paths))


def broadcast_keywords(asked: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Asked]:
    """Returns the expectation for each leaf of the keyword arguments, in JAX's order."""
    if not isinstance(asked, Mapping):
        raise AxesError(
            "`keywords`: expected a mapping from names of keyword arguments to expectations; got "
            f"{type(asked).__name__}"
        )
    return broadcast(dict.fromkeys(kwargs) | dict(asked), kwargs, "keywords")


def _asked(entry: Any, leaf: Any, path: str) -> Asked:
    """Returns the expectation of an entry; of an array its dtype, and sharding if it has a mesh."""
    if entry is None or isinstance(entry, Sharding):
        return Asked(entry)
    if not hasattr(entry, "shape") or not hasattr(entry, "dtype"):
        raise AxesError(
            f"`{path}`: expected a `Layout`, a sharding, an array or `None`; got "
            f"{type(entry).__name__} ({entry!r})"
        )
    if tuple(entry.shape) != tuple(leaf.shape):
        raise AxesError(
            f"`{path}`: expected {leaf.dtype}{list(leaf.shape)}, as in the step; got "
            f"{entry.dtype}{list(entry.shape)}"
        )
    sharding = getattr(entry, "sharding", None)
    return Asked(sharding if isinstance(sharding, NamedSharding) else None, entry.dtype)


def argument_places(arguments: Mapping[str, Any], expected: Expected) -> dict[Role, Keys]:
    """Returns the keys of the parameters and of the state; checks that they are apart."""
    params = _keys(arguments, expected.params, "params")
    state = _keys(arguments, expected.state, "state")
    if is_in(params, state) or is_in(state, params):
        raise AxesError(
            f"`params` and `state`: {expected.params!r} and {expected.state!r} overlap; pass the "
            "path of only the parameters as `params`, and of only the optimizer state as `state`"
        )
    return {"params": params, "state": state}


def is_in(names: Keys, place: Keys) -> bool:
    """Whether the keys of a leaf start with those of a place."""
    return names[: len(place)] == place


def _keys(arguments: Any, path: str, field: str) -> Keys:
    """Returns the keys of a path; checks that it exists."""
    if not isinstance(path, str):
        raise TypeError(
            f"`{field}` must be a path in the step's arguments, e.g. '0' or '0/params'; got "
            f"{path!r}"
        )
    keys = split_path(path)
    tree = arguments
    for depth, key in enumerate(keys):
        named = {key_name(k): child for k, child in children(tree) or ()}
        if key not in named:
            raise AxesError(
                f"`{field}`: the step has no argument at {path!r}; "
                f"{'/'.join(keys[:depth]) or 'the top level'} has {list(named)}"
            )
        tree = named[key]
    return keys
