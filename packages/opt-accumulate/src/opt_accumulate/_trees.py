"""Paths of leaves, the nodes of a tree, and checks of trees that users pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from opt_accumulate.errors import OptionError

_SHOWN = 20

Path = tuple[Any, ...]


def path_str(path: Sequence[Any]) -> str:
    """Returns a JAX key path as `decoder/layers_0/kernel`; the root is `.`."""
    # As in JSON Pointer (RFC 6901): no two leaves of a tree share a path.
    if not path:
        return "."
    names = (keystr((key,), simple=True) for key in path)
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)


def children(node: Any) -> list[tuple[Path, Any]]:
    """Returns what is right below a node of a tree, with its key; nothing of a leaf."""
    keyed = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return [(path, child) for path, child in keyed if path]


def walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields all nodes of a tree with their paths, outer ones first; leaves too."""
    yield path, node
    for key, child in children(node):
        yield from walk(child, path + key)


def differences(expected: Any, found: Any) -> list[str]:
    """Returns one indented line for each way in which a tree is not as expected."""
    treedef: Any
    leaves, treedef = tree_flatten_with_path(expected)
    others, other_treedef = tree_flatten_with_path(found)
    if treedef == other_treedef:
        return [
            f"  {path_str(path)}: expected shape {np.shape(leaf)}, found {np.shape(other)}"
            for (path, leaf), (_, other) in zip(leaves, others, strict=True)
            if np.shape(leaf) != np.shape(other)
        ]
    here, there = ({path_str(path): None for path, _ in side} for side in (leaves, others))
    lines = [f"  {path}: expected a leaf, found none" for path in here if path not in there]
    lines += [f"  {path}: expected none, found a leaf" for path in there if path not in here]
    return lines or [f"  containers: expected {treedef}, found {other_treedef}"]


def described(tree: Any, describe: Callable[[Any], str], is_leaf: Any = None) -> list[str]:
    """Returns an indented line with the path of each leaf that there is something to say of."""
    keyed = tree_flatten_with_path(tree, is_leaf)[0]
    return [f"  {path_str(path)}: {text}" for path, leaf in keyed if (text := describe(leaf))]


def what_is_wrong(leaf: Any) -> str:
    """Says why JAX cannot compute with a leaf; nothing of one that it can compute with."""
    if isinstance(leaf, jax.Array):
        is_gone = not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()
        return "a deleted array (was it donated?)" if is_gone else ""
    if isinstance(leaf, np.ndarray | np.generic):
        is_number = leaf.dtype.kind not in "OSUMm" and leaf.dtype.names is None
        return "" if is_number else f"an array of dtype {leaf.dtype}"
    if isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype"):
        return ""
    return "" if hasattr(leaf, "__jax_array__") else f"a {type(leaf).__name__}"


def check_numbers(tree: Any, argument: str) -> None:
    """Raises a `TypeError` unless all leaves are arrays or numbers; lists every path."""
    if wrong := described(tree, what_is_wrong):
        raise TypeError(f"`{argument}` must be a tree of arrays; it has\n" + "\n".join(wrong))


def check_like(tree: Any, accumulator: Any, argument: str = "updates") -> None:
    """Raises unless gradients or parameters have the structure and shapes of the accumulator."""
    check_numbers(tree, argument)
    if wrong := differences(accumulator, tree):
        raise ValueError(
            f"`{argument}` do not look like the accumulator, which looks like the parameters that "
            "`init` got:\n" + "\n".join(wrong) + "\nPass those parameters and gradients with "
            "respect to them, or make a new state with `init`."
        )


def check_integer(name: str, value: Any, least: int) -> int:
    """Returns Python's integer; raises an `OptionError` unless it is one of at least `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise OptionError(f"`{name}` must be an integer of at least {least}, found {value!r}.")
    return number


def check_choice(name: str, value: Any, choices: tuple[Any, ...], or_else: str = ".") -> None:
    """Raises an `OptionError` unless a value is one of the choices, and of its type."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = ", ".join(map(repr, choices))
        raise OptionError(f"`{name}` is {value!r}; it must be one of {listed}{or_else}")


def broadcast_prefix(prefix: Any, tree: Any, argument: str, is_leaf: Any = None) -> Any:
    """Returns a tree like `tree` with, for each leaf, the leaf of `prefix` at or above it."""
    try:
        return jax.tree.broadcast(prefix, tree, is_leaf)
    except ValueError as error:
        raise OptionError(
            f"`{argument}` must be one value for all, or a tree like {_leaves(tree)}, which may "
            f"end above these; it has {_leaves(prefix, is_leaf)}."
        ) from error


def _leaves(tree: Any, is_leaf: Any = None) -> str:
    paths = [path_str(path) for path, _ in tree_flatten_with_path(tree, is_leaf)[0]]
    shown = ", ".join(paths[:_SHOWN]) or "no leaves"
    return shown if len(paths) <= _SHOWN else f"{shown} and {len(paths) - _SHOWN} more"
