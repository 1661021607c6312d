"""Paths of leaves, and one level of a pytree at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, SequenceKey, keystr

KeyPath = tuple[Any, ...]


class Node(NamedTuple):
    """One pytree node, opened.

    Attributes:
      children: key and subtree of each child, in the node's own order.
      rebuild: makes the node again from new children in that order.
    """

    children: list[tuple[Any, Any]]
    rebuild: Callable[[Sequence[Any]], Any]


def path_str(path: Sequence[Any]) -> str:
    """Returns a JAX key path as `decoder/layers_0/kernel`; the root is `.`.

    Examples:
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'mlp': [1.0]})
      >>> path_str(path)
      'mlp/0'
    """
    return keystr(tuple(path), simple=True, separator="/") or "."


def key_name(key: Any) -> str:
    """Returns the name of one key of a JAX key path, e.g. `'kernel'` or `'0'`."""
    return keystr((key,), simple=True)


def children(node: Any) -> Node | None:
    """Opens one level of a pytree; `None` where `node` is a leaf, as `None` itself is here.

    Examples:
      >>> [(key_name(key), child) for key, child in children({'b': 1, 'a': (2, 3)}).children]
      [('a', (2, 3)), ('b', 1)]
      >>> children(1.0) is None
      True
    """
    if node is None:
        return None
    keyed, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    rebuild = functools.partial(jax.tree_util.tree_unflatten, treedef)
    return Node([(key, child) for (key,), child in keyed], rebuild)


def descend(tree: Any, path: Sequence[Any]) -> Any:
    """Returns what `tree` holds at a key path; `None` if it has no such path.

    Examples:
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'mlp': [1.0]})
      >>> descend({'mlp': [2.0, 3.0]}, path), descend({'attention': []}, path)
      (2.0, None)
    """
    for key in path:
        match key:
            case DictKey(key=name):
                tree = tree.get(name) if isinstance(tree, Mapping) else None
            case SequenceKey(idx=index):
                is_long = isinstance(tree, list | tuple) and index < len(tree)
                tree = tree[index] if is_long else None
            case _ if isinstance(tree, dict | list):
                return None  # without opening it: it may be large
            case _:
                node = children(tree)
                tree = dict(node.children).get(key) if node else None
    return tree


def flatten_with_paths(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yields key path and leaf of every leaf, in JAX's order."""
    yield from jax.tree_util.tree_leaves_with_path(tree)
