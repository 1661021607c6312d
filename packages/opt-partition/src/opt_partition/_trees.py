"""Paths of leaves, traversal of pytrees one level at a time, and alignment of two of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from opt_partition.errors import AxesError

KeyPath = tuple[Any, ...]
_T = TypeVar("_T")


def path_str(path: Sequence[Any]) -> str:
    """Formats a JAX key path as `decoder/layers_0/a~1b`; the root is `.`.

    As in JSON Pointer (RFC 6901), `~` in a key is written `~0` and `/` is written `~1`, so that
    every leaf of a tree has a unique path.
    """
    if not path:
        return "."
    return "/".join(key_name(key).replace("~", "~0").replace("/", "~1") for key in path)


def split_path(path: str) -> tuple[str, ...]:
    """Inverts `path_str`: returns the names of the keys in a path."""
    if path == ".":
        return ()
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in path.split("/"))


def names_of(path: KeyPath) -> tuple[str, ...]:
    """Returns the names of the keys of a JAX key path."""
    return tuple(map(key_name, path))


def key_name(key: Any) -> str:
    """Returns the name of one key of a JAX key path, e.g. `'kernel'` or `'0'`."""
    return keystr((key,), simple=True)


def owner_of(
    names: tuple[str, ...], parameters: Mapping[tuple[str, ...], _T]
) -> tuple[_T | None, bool]:
    """Returns the parameter, by names, that a state leaf with the names in its path belongs to.

    It is the one whose path is contained in that of the leaf; the last one, if there are several.
    Also returns whether this path has indices alone, which may mean something else.
    """
    for end in range(len(names), 0, -1):
        for start in range(end):
            if (owner := parameters.get(names[start:end])) is not None:
                return owner, all(map(str.isdecimal, names[start:end]))
    return parameters.get(()), False


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns the key and subtree of each child, or `None` for a leaf; here `None` is a leaf."""
    if node is None:
        return None
    keyed = tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    return [(key, child) for (key,), child in keyed]


def leaves_with_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path, as a string, and the value of every leaf, in JAX's order."""
    return ((path_str(path), leaf) for path, leaf in tree_leaves_with_path(tree))


def align(
    tree: Any,
    like: Any,
    argument: str,
    is_leaf: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """Returns the entry of `tree` for each leaf of `like`, in JAX's order.

    Container types may differ as long as the keys agree, e.g. a dict for a FrozenDict, and entries
    may be `None`, although JAX treats it as an empty container. `argument` is the caller's name for
    `tree`, for the `AxesError` that lists the paths where they differ.
    """
    treedef: Any = jax.tree.structure(like, is_leaf=is_leaf)
    with contextlib.suppress(ValueError):  # different container types, or a mismatch
        return list(treedef.flatten_up_to(tree))
    problems: list[str] = []

    def walk(tree: Any, like: Any, path: KeyPath) -> Iterator[Any]:
        node, given = None if is_leaf(like) else children(like), children(tree)
        if node is None and like is not None:
            yield tree
            return
        entries = {key_name(key): (key, child) for key, child in given or ()}
        for key, child in node or ():
            if key_name(key) in entries:
                yield from walk(entries.pop(key_name(key))[1], child, (*path, key))
                continue
            for inside, _ in tree_leaves_with_path(child, is_leaf=is_leaf):
                problems.append(f"{path_str((*path, key, *inside))}: missing")
                yield None
        if given is None and tree is not None:
            problems.append(f"{path_str(path)}: expected a container, found {tree!r:.80}")
        for key, child in entries.values():
            if jax.tree.leaves(child):
                problems.append(f"{path_str((*path, key))}: unexpected")

    entries = list(walk(tree, like, ()))
    if problems:
        head = f"`{argument}` does not have the tree structure of its leaves:"
        raise AxesError("\n  ".join([head, *problems]))
    return entries


def map_leaves(
    function: Callable[[KeyPath, Any, Any], _T],
    leaves: Iterable[tuple[KeyPath, Any]],
    entries: Sequence[Any],
    head: str,
) -> list[_T]:
    """Returns `function(path, leaf, entry)` of each leaf; one error lists all those raised."""
    results, problems = [], []
    for (path, leaf), entry in zip(leaves, entries, strict=True):
        try:
            results.append(function(path, leaf, entry))
        except (TypeError, AxesError) as error:
            problems.append(f"{path_str(path)}: {error}")
    if problems:
        raise AxesError("\n  ".join([head, *problems]))
    return results
