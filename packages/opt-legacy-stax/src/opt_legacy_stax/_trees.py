"""Paths of parameters, and the errors that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, keystr, tree_flatten_with_path

from opt_legacy_stax.errors import TreeMismatchError

_SHOWN = 5
_LEAF = object()  # stands for an array


def path_str(path: Sequence[Any]) -> str:
    """Formats a JAX key path as `decoder/layers_0/kernel`; the root is `.`."""
    if not path:
        return "."
    # `~` and `/` in a key as in JSON Pointer (RFC 6901), so that every leaf has a unique path
    names = (keystr((key,), simple=True) for key in path)
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)


def leaf_paths(tree_def: Any) -> list[str]:
    """Returns the path of every leaf of a tree definition."""
    tree = jax.tree.unflatten(tree_def, [0] * tree_def.num_leaves)
    return [path_str(path) for path, _ in tree_flatten_with_path(tree)[0]]


def first_lines(lines: Sequence[str]) -> str:
    """Returns the first few lines, indented, and the number of lines omitted."""
    shown = [f"  {line}" for line in lines[:_SHOWN]]
    rest = len(lines) - _SHOWN
    return "\n".join([*shown, f"  and {rest} more"] if rest > 0 else shown)


def shown(text: str, limit: int = 100) -> str:
    r"""Returns untrusted text, escaped and shortened for an error message."""
    cut = text if len(text) <= limit else text[: limit - 3]
    escaped = cut if cut.isprintable() else repr(cut)[1:-1]
    return escaped if cut is text else escaped + "..."


def different_trees(tree_def: Any, grads_def: Any) -> TreeMismatchError:
    """Returns the error for gradients whose structure differs from that of the parameters."""
    return TreeMismatchError(
        "`grad_tree` does not have the tree structure of the parameters that the optimizer was "
        f"initialized with:\n{difference(tree_def, grads_def)}\nDifferentiate with respect to "
        "`get_params(opt_state)`, or convert the gradients to the containers of the parameters."
    )


def difference(expected: Any, found: Any) -> str:
    """Returns lines that say how two tree definitions differ."""
    lines = differences(nodes(expected), nodes(found))
    return first_lines(lines or [f"static data: expected {expected}, found {found}"])


def layout_difference(expected: Any, found: Any) -> str:
    """Returns lines that say how two trees differ in structure or shapes; none if they do not."""
    tree_defs: list[Any] = [jax.tree.structure(each) for each in (expected, found)]
    if tree_defs[0] != tree_defs[1]:
        return difference(*tree_defs)
    pairs = zip(tree_flatten_with_path(expected)[0], jax.tree.leaves(found), strict=True)
    shapes = [(path_str(path), np.shape(leaf), np.shape(other)) for (path, leaf), other in pairs]
    return first_lines([f"{at}: expected shape {a}, found {b}" for at, a, b in shapes if a != b])


def nodes(tree_def: Any) -> dict[str, str]:
    """Returns the kind of every node by path, parents first."""
    return dict(_nodes(jax.tree.unflatten(tree_def, [_LEAF] * tree_def.num_leaves), ()))


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Returns a line for each node where two trees differ, unless an ancestor differs."""
    lines: list[str] = []
    below: list[str] = []
    for path in dict.fromkeys([*expected, *found]):
        kinds = [each.get(path, "nothing") for each in (expected, found)]
        if kinds[0] != kinds[1] and not path.startswith(tuple(below)):
            where = path.removesuffix(":")  # `path:` is the state of a parameter, in files
            below += [""] if where == "." else [f"{where}/", f"{where}:"]
            lines.append(f"{shown(where)}: expected {shown(kinds[0])}, found {shown(kinds[1])}")
    pairs = zip(expected, found, strict=False)
    if not lines and (pair := next((pair for pair in pairs if pair[0] != pair[1]), None)):
        first, other = map(shown, pair)
        lines.append(f"keys in a different order, expected `{first}` where `{other}` was found")
    return lines


def _nodes(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    if node is _LEAF:
        yield path_str(path), "an array"
        return
    # As in JAX, `None` is a node without children.
    keyed, _ = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    yield path_str(path), _kind(node, [key for (key,), _ in keyed])
    for (key,), child in keyed:
        yield from _nodes(child, (*path, key))


def _kind(node: Any, keys: Sequence[Any]) -> str:
    if node is None:
        return "None"
    name = type(node).__name__
    types = {type(key.key).__name__ for key in keys if isinstance(key, DictKey)} - {"str"}
    suffix = f" with {' and '.join(sorted(types))} keys" if types else ""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}{suffix}"
