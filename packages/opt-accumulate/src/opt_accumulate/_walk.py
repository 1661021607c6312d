"""The nodes of a state, one below the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.tree_util import tree_flatten_with_path

Path = tuple[Any, ...]


def children(node: Any) -> list[tuple[Path, Any]]:
    """Returns what is right below a node of a tree, with its key; nothing of a leaf."""
    found = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(path, child) for path, child in found if path]


def walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields all nodes of a tree with their paths, outer ones first; leaves too.

    Examples:
      >>> [len(path) for path, _ in walk({'a': (1, [2])})]
      [0, 1, 2, 2, 3]
    """
    yield path, node
    for key, child in children(node):
        yield from walk(child, path + key)
