"""Which leaf of a state mirrors which parameter, and as which field of what."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

KeyPath = tuple[Any, ...]


class Mirror(NamedTuple):
    """A leaf of a state that has the shape of a parameter, and its path at the end of its own."""

    param: int  # the index of the parameter
    field: str  # the key above the parameter's path: `mu` of Adam, say
    owner: type  # the class of the node that has the field


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
    """Returns for each leaf of a state, by paths and shapes, the parameter that it mirrors."""
    table = {path: (index, shape) for index, (path, shape) in enumerate(params)}

    def mirror(path: KeyPath, shape: tuple[int, ...]) -> Mirror | None:
        for start in range(1, len(path) + 1):
            index, wanted = table.get(path[start:], (-1, None))
            if wanted == shape:
                owner = functools.reduce(_child, path[: start - 1], state)
                return Mirror(index, key_name(path[start - 1]), type(owner))
        return None

    return [mirror(path, shape) for path, shape in leaves]


def _child(node: Any, key: Any) -> Any:
    """The child of a node under a key of JAX's."""
    keyed = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return next(child for path, child in keyed if path == (key,))
