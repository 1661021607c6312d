"""Which leaf of a state mirrors which parameter, and as which field of what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

KeyPath = tuple[Any, ...]


class Mirror(NamedTuple):
    """A leaf of a state that has the shape of a parameter, and its path at the end of its own.

    Attributes:
      param: the index of the parameter.
      field: the key above the parameter's path: `mu` of Adam, say.
      owner: the class of the node that has the field.
    """

    param: int
    field: str
    owner: type


def key_name(key: Any) -> str:
    """The name of one key of a JAX key path."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def path_str(path: KeyPath) -> str:
    """The names along a path, joined by `/`; inside of a name `~` is `~0` and `/` is `~1`.

    Examples:
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'mlp': {'w/b': 1.0}})
      >>> path_str(path), path_str(())
      ('mlp/w~1b', '.')
    """
    names = (key_name(key).replace("~", "~0").replace("/", "~1") for key in path)
    return "/".join(names) or "."


def find_mirrors(
    params: Sequence[tuple[KeyPath, tuple[int, ...]]],
    state: Any,
    leaves: Sequence[tuple[KeyPath, tuple[int, ...]]],
) -> list[Mirror | None]:
    """Returns for each leaf of a state the parameter that it mirrors, if it does.

    Args:
      params: paths and shapes of the parameters.
      state: the state, for the classes of its nodes.
      leaves: paths and shapes of its leaves.
    """
    table: Mapping[KeyPath, tuple[int, tuple[int, ...]]] = {
        path: (index, shape) for index, (path, shape) in enumerate(params)
    }
    return [_mirror(table, state, path, shape) for path, shape in leaves]


def _mirror(
    table: Mapping[KeyPath, tuple[int, tuple[int, ...]]],
    state: Any,
    path: KeyPath,
    shape: tuple[int, ...],
) -> Mirror | None:
    for start in range(1, len(path) + 1):
        index, wanted = table.get(path[start:], (-1, None))
        if wanted == shape:
            owner = state
            for key in path[: start - 1]:
                owner = _child(owner, key)
            return Mirror(index, key_name(path[start - 1]), type(owner))
    return None


def _child(node: Any, key: Any) -> Any:
    """The child of a node under a key of JAX's."""
    keyed = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return next(child for path, child in keyed if path == (key,))
