"""Alignment of a tree with the leaves of another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves_with_path

from opt_partition._trees import KeyPath, children, key_name, path_str
from opt_partition.errors import AxesError


def align(tree: Any, like: Any, argument: str, *, prefix: bool = False) -> list[Any]:
    """Returns the entry of `tree` for each leaf of `like`, in JAX's order.

    Container types may differ as long as the keys agree, e.g. a dict for a FrozenDict, and entries
    may be `None`, although JAX treats it as an empty container.

    With `prefix`, a leaf of `tree` may apply to a whole subtree of `like`. `argument` is the
    caller's name for `tree`, for the `AxesError` that lists the paths where they differ.
    """
    entries, problems = aligned(tree, like, prefix=prefix)
    if problems:
        head = f"`{argument}` does not have the tree structure of its leaves:"
        raise AxesError("\n  ".join([head, *problems]))
    return entries


def aligned(
    tree: Any,
    like: Any,
    *,
    prefix: bool = False,
    is_leaf: Callable[[Any], bool] = lambda _: False,
    missing: str = "missing",
    unexpected: str = "unexpected",
) -> tuple[list[Any], list[str]]:
    """Returns the entries of `align`, `None` for one that is missing, and all mismatches."""
    if not prefix:
        treedef: Any = jax.tree.structure(like, is_leaf=is_leaf)
        with contextlib.suppress(ValueError):  # different container types, or a mismatch
            return list(treedef.flatten_up_to(tree)), []
    problems: list[str] = []

    def walk(tree: Any, like: Any, path: KeyPath) -> Iterator[Any]:
        node, given = None if is_leaf(like) else children(like), children(tree)
        if node is None:
            if like is not None:
                yield tree
            elif tree is not None:
                problems.append(f"{path_str(path)}: expected nothing, found {brief(tree)}")
            return
        if given is None and prefix:
            yield from [tree] * len(jax.tree.leaves(like))
            return
        keys = ", ".join(key_name(key) for key, _ in node)
        if given is None and (keys or tree is not None):
            problems.append(f"{path_str(path)}: expected keys {keys}; found {brief(tree)}")
            yield from [None] * len(jax.tree.leaves(like, is_leaf=is_leaf))
            return
        found = {key_name(key): (key, child) for key, child in given or ()}
        for key, child in node:
            below = (*path, key)
            if key_name(key) in found:
                yield from walk(found.pop(key_name(key))[1], child, below)
                continue
            for inside, _ in tree_leaves_with_path(child, is_leaf=is_leaf):
                problems.append(f"{path_str((*below, *inside))}: {missing}")
                yield None
        for key, child in found.values():
            if prefix or jax.tree.leaves(child):
                problems.append(f"{path_str((*path, key))}: {unexpected}")

    return list(walk(tree, like, ())), problems


def brief(value: Any) -> str:
    """Describes an unexpected value in a few words."""
    if isinstance(value, PartitionSpec):
        return "a PartitionSpec"  # the name of the class depends on the JAX version
    return "None" if value is None else f"a {type(value).__name__}"
