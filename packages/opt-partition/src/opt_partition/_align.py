"""Alignment of a tree with the leaves of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._trees import KeyPath, children, key_name, path_str
from opt_partition.errors import AxesError


def align(tree: Any, like: Any, argument: str, *, prefix: bool = False) -> list[Any]:
    """Returns the entry of `tree` for each leaf of `like`, in JAX's order.

    Container types may differ as long as the keys agree, e.g. a dict for a FrozenDict, and entries
    may be `None`, although JAX treats it as an empty container.

    With `prefix`, a leaf of `tree` may apply to a whole subtree of `like`. `argument` is the
    caller's name for `tree`, for the `AxesError` that lists the paths where they differ.
    """
    if not prefix:
        treedef: Any = jax.tree.structure(like)
        try:
            return list(treedef.flatten_up_to(tree))
        except ValueError:
            pass  # different container types, or a mismatch, which `_walk` reports
    problems: list[str] = []
    entries = list(_walk(tree, like, (), prefix, problems))
    if problems:
        raise AxesError(
            "\n  ".join(
                [f"`{argument}` does not have the tree structure of its leaves:", *problems]
            )
        )
    return entries


def _walk(tree: Any, like: Any, path: KeyPath, prefix: bool, problems: list[str]) -> Iterator[Any]:
    """Yields the entries of `align`; appends mismatches to `problems`."""
    node, given = children(like), children(tree)
    if node is None:
        if like is not None:
            yield tree
        elif tree is not None:
            problems.append(f"{path_str(path)}: expected nothing, found {brief(tree)}")
        return
    if given is None and prefix:
        yield from [tree] * len(jax.tree.leaves(like))
        return
    expected = {key_name(key): (key, child) for key, child in node}
    found = {key_name(key): child for key, child in given} if given else {}
    if given is None and (expected or tree is not None):
        keys = ", ".join(expected)
        problems.append(f"{path_str(path)}: expected keys {keys}; found {brief(tree)}")
        return
    problems += [
        f"{path_str((*path, key))}: missing"
        for name, (key, _) in expected.items()
        if name not in found
    ]
    problems += [
        f"{path_str((*path, key))}: unexpected"
        for key, _ in given or []
        if key_name(key) not in expected
    ]
    for name, (key, child) in expected.items():
        if name in found:
            yield from _walk(found[name], child, (*path, key), prefix, problems)


def brief(value: Any) -> str:
    """Describes an unexpected value in a few words."""
    if isinstance(value, PartitionSpec):
        return "a PartitionSpec"  # the name of the class depends on the JAX version
    return "None" if value is None else f"a {type(value).__name__}"
