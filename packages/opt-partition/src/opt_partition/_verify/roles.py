"""Location of the parameters and the state in the arguments and the result of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from opt_partition._trees import children, flatten_with_paths, key_name, split_path
from opt_partition._verify.report import Role
from opt_partition.errors import AxesError

# One string per key, as keys may contain the `/` that joins them in messages.
Keys = tuple[str, ...]
Places = Mapping[Role, Keys]


def key_names(path: Sequence[Any]) -> Keys:
    """Returns the names of the keys of a JAX key path."""
    return tuple(map(key_name, path))


def find_arguments(arguments: Any, params: str, state: str) -> dict[Role, Keys]:
    """Resolves `Expected.params` and `Expected.state`.

    Args:
      arguments: a dict of the arguments by position or keyword.
      params: path of the parameters.
      state: path of the state.

    Raises:
      AxesError: a path does not exist, or one contains the other.

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
            f"`params` and `state`: {params!r} and {state!r} overlap; pass the path of only the "
            "parameters as `params`, and of only the optimizer state as `state`"
        )
    return places


def find_results(
    out: Any,
    like: Mapping[Role, Mapping[Keys, tuple[int, ...]]],
    rank: Callable[[Role, Keys], Any],
) -> dict[Role, Keys]:
    """Finds the trees in the result with the same paths and shapes as parameters and state.

    The state is searched first, as it often contains trees with the structure of the parameters,
    but not vice versa.

    Args:
      out: the result of the step.
      like: shapes of the parameters and of the state, by path.
      rank: ranks several matching trees, e.g. gradients returned along with parameters; the first
        one with the highest rank is chosen.
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
    """Returns the role of the leaf at `path`, and its path relative to that."""
    names = key_names(path)
    for role, place in places.items():
        if names[: len(place)] == place:
            return role, names[len(place) :]
    return "other", names


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
        node = children(tree)
        named = {key_name(k): child for k, child in node} if node else {}
        if key not in named:
            raise AxesError(
                f"`{field}`: the step has no argument at {path!r}; "
                f"{'/'.join(keys[:depth]) or 'the top level'} has {list(named)}"
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
