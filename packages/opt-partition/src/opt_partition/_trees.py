"""Paths of leaves, and traversal of pytrees one level at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey, keystr

KeyPath = tuple[Any, ...]

_NAMES: Mapping[type, Callable[[Any], Any]] = {
    DictKey: operator.attrgetter("key"),
    FlattenedIndexKey: operator.attrgetter("key"),
    GetAttrKey: operator.attrgetter("name"),
    SequenceKey: operator.attrgetter("idx"),
}


def path_str(path: Sequence[Any]) -> str:
    """Formats a JAX key path as `decoder/layers_0/kernel`; the root is `.`.

    As in JSON Pointer (RFC 6901), `~` in a key is written `~0` and `/` is written `~1`, so that
    every leaf of a tree has a unique path.

    Examples:
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'mlp': {'a/b': [1.0]}})
      >>> path_str(path)
      'mlp/a~1b/0'
    """
    if not path:
        return "."
    return "/".join(escaped(key_name(key)) for key in path)


def escaped(name: str) -> str:
    """Returns the name of a key, escaped for use in a path."""
    return name.replace("~", "~0").replace("/", "~1")


def split_path(path: str) -> tuple[str, ...]:
    """Inverts `path_str`: returns the names of the keys in a path.

    Examples:
      >>> split_path('mlp/a~1b/0')
      ('mlp', 'a/b', '0')
    """
    if path == ".":
        return ()
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in path.split("/"))


def key_name(key: Any) -> str:
    """Returns the name of one key of a JAX key path, e.g. `'kernel'` or `'0'`."""
    read = _NAMES.get(type(key))  # as `keystr` does, which takes five times as long
    return str(read(key)) if read else keystr((key,), simple=True)


def is_index(key: Any) -> bool:
    """Whether a key may be a position in a list rather than a name."""
    match key:
        case SequenceKey() | FlattenedIndexKey():
            return True
        case DictKey(key=name):
            is_int = isinstance(name, int) and not isinstance(name, bool)
            return is_int or str(name).isdecimal()
        case _:
            return False


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns the key and subtree of each child, or `None` for a leaf; here `None` is a leaf.

    Examples:
      >>> [(key_name(key), child) for key, child in children({'b': 1, 'a': (2, 3)})]
      [('a', (2, 3)), ('b', 1)]
      >>> children(1.0) is None
      True
    """
    if node is None:
        return None
    keyed = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    return [(key, child) for (key,), child in keyed]


def descend(tree: Any, path: Sequence[Any]) -> Any:
    """Returns the subtree of `tree` at a key path, or `None` if the path does not exist.

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
                return None  # avoid flattening a large container
            case _:
                node = children(tree)
                tree = dict(node).get(key) if node else None
    return tree


def flatten_with_paths(tree: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the key path and value of every leaf, in JAX's order.

    Flattens one child at a time: holding all key paths of a large tree at once triggers full
    garbage collections, so that the time would grow faster than the tree.
    """
    for key, child in children(tree) or [(None, tree)]:
        start = () if key is None else (key,)
        for path, leaf in jax.tree_util.tree_leaves_with_path(child):
            yield (*start, *path), leaf


def leaves_with_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path, as a string, and the value of every leaf, in JAX's order."""
    return ((path_str(path), leaf) for path, leaf in flatten_with_paths(tree))
