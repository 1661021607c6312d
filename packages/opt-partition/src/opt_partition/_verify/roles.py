"""Where in the arguments and the result of a step its parameters and its state are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from opt_partition._trees import children, flatten_with_paths, key_name, split_path
from opt_partition._verify.report import Role
from opt_partition.errors import AxesError

# Of strings, one for each key: keys may contain the `/` that joins them in messages.
Keys = tuple[str, ...]
Places = Mapping[Role, Keys]


def key_names(path: Sequence[Any]) -> Keys:
    """The names of the keys of a JAX key path."""
    return tuple(map(key_name, path))


def find_arguments(arguments: Any, params: str, state: str) -> dict[Role, Keys]:
    """Where `Expected.params` and `Expected.state` point to.

    Args:
      arguments: a tree whose first keys are places and keywords.
      params: path of the parameters.
      state: path of the state.

    Raises:
      AxesError: a path leads nowhere, or one into the other.

    Examples:
      >>> find_arguments({'0': 1.0, 'state': {'mu': 2.0}}, '0', 'state/mu')
      {'params': ('0',), 'state': ('state', 'mu')}
    """
    places: dict[Role, Keys] = {
        "params": _keys(arguments, params, "params"),
        "state": _keys(arguments, state, "state"),
    }
    shared = min(map(len, places.values()))
    if places["params"][:shared] == places["state"][:shared]:
        raise AxesError(
            f"`params` and `state`: {params!r} and {state!r} overlap; give the path of the "
            "parameters alone as `params` and that of the optimizer state alone as `state`"
        )
    return places


def find_results(
    out: Any,
    like: Mapping[Role, Mapping[Keys, tuple[int, ...]]],
    rank: Callable[[Role, Keys], Any],
) -> dict[Role, Keys]:
    """Where in the result there are trees of the same paths and shapes as arguments.

    The state first: it often holds trees like the parameters, but not the other way round.

    Args:
      out: the step's result.
      like: the shapes of the parameters and of the state, by path.
      rank: of several such trees, as gradients are returned beside parameters, the first of the
        highest rank is taken.
    """
    places: dict[Role, Keys] = {}
    roles: tuple[Role, ...] = ("state", "params")
    for role in roles:
        found = [
            place
            for place, tree in _subtrees(out, ())
            if like[role]
            and not any(place[: len(other)] == other for other in places.values())
            and len(jax.tree.leaves(tree)) == len(like[role])  # cheaper than the names
            and _names_and_shapes(tree) == like[role]
        ]
        if found:
            places[role] = max(found, key=lambda p: rank(role, p)) if found[1:] else found[0]
    return places


def role_of(path: Sequence[Any], places: Places) -> tuple[Role, Keys]:
    """What the leaf at `path` is, and its path from there."""
    names = key_names(path)
    for role, place in places.items():
        if names[: len(place)] == place:
            return role, names[len(place) :]
    return "other", names


def _keys(arguments: Any, path: str, field: str) -> Keys:
    """The keys of a path that there is."""
    if not isinstance(path, str):
        raise TypeError(
            f"`{field}` must be a path in the step's arguments, as '0' or '0/params'; got {path!r}"
        )
    keys = split_path(path)
    tree = arguments
    for depth, key in enumerate(keys):
        node = children(tree)
        named = {key_name(k): child for k, child in node} if node else {}
        if key not in named:
            raise AxesError(
                f"`{field}`: no argument of the step is at {path!r}; "
                f"{'/'.join(keys[:depth]) or 'the top'} has {list(named)}"
            )
        tree = named[key]
    return keys


def _subtrees(tree: Any, place: Keys) -> Iterator[tuple[Keys, Any]]:
    yield place, tree
    node = children(tree)
    for key, child in node or ():
        yield from _subtrees(child, (*place, key_name(key)))


def _names_and_shapes(tree: Any) -> dict[Keys, tuple[int, ...]]:
    return {key_names(path): tuple(leaf.shape) for path, leaf in flatten_with_paths(tree)}
