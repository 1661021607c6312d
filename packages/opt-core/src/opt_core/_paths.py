"""Paths of leaves, and one level of a pytree at a time.

A path is the keys from the root to a leaf. Every kind of pytree node names its children through
JAX's key paths, so dicts, lists, named tuples, Flax and Equinox classes need no special code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

KeyPath = Sequence[Any]
Names: TypeAlias = tuple[str, ...]
"""The names along a path, starting at the root."""


class Node(NamedTuple):
    """One pytree node, opened.

    Attributes:
      children: name and subtree of each child, in the node's own order.
      rebuild: rebuilds the node from new children in that order.
    """

    children: list[tuple[str, Any]]
    rebuild: Callable[[Sequence[Any]], Any]


def parts_at(structure: Any, tree: Any) -> list[Any] | None:
    """Returns the subtrees at the leaves of a structure, with numbers for the tree's leaves."""
    # `None` if it has other containers. JAX's error would print the arrays, which may be large or
    # deleted.
    own: Any = jax.tree.structure(tree)
    try:
        return list(structure.flatten_up_to(own.unflatten(range(own.num_leaves))))
    except (ValueError, TypeError, KeyError):
        return None


def key_name(key: Any) -> str:
    """Returns the name of one key of a JAX key path, e.g. `'kernel'` or `'0'`."""
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=index):
            return str(index)
        case GetAttrKey(name=name):
            return str(name)
        case _:
            return str(key)


def path_names(key_path: KeyPath) -> tuple[str, ...]:
    """Returns the names along a JAX key path."""
    return tuple(key_name(key) for key in key_path)


def path_str(names: Sequence[str]) -> str:
    """Returns the names along a path joined by `/`; the root is `.`.

    Within a name `~` is `~0` and `/` is `~1`, as in JSON Pointer (RFC 6901), so no two leaves of a
    tree share a path.

    Examples:
      >>> path_str(('mlp', 'a/b', '0'))
      'mlp/a~1b/0'
    """
    if not names:
        return "."
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)


def split_path(path: str) -> tuple[str, ...]:
    """Returns the names of a path that were joined by `/`.

    Examples:
      >>> split_path('mlp/a~1b/0')
      ('mlp', 'a/b', '0')
    """
    if path == ".":
        return ()
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in path.split("/"))


def children(node: Any) -> Node | None:
    """Opens one level of a pytree."""
    if node is None:
        return None
    keyed, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    rebuild = functools.partial(jax.tree_util.tree_unflatten, treedef)
    return Node([(key_name(key), child) for (key,), child in keyed], rebuild)


def flatten_with_paths(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the names along the path, and the leaf, for every leaf of `tree`."""
    node = children(tree)
    if node is None:
        yield (), tree
        return
    for name, child in node.children:
        for names, leaf in flatten_with_paths(child):
            yield (name, *names), leaf


def listed(names: Iterable[str], none: str = "none") -> str:
    """Returns names as a list for messages."""
    return ", ".join(f"`{name}`" for name in names) or none


def aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yields the lines of a table; `sides` aligns columns: `<` to the left, `>` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in columns).rstrip()
