"""Paths of parameters, and the errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from opt_legacy_stax.errors import StateChangedError, TreeMismatchError

_SHOWN = 5


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
    names = (keystr((key,), simple=True) for key in path)
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)


def leaf_paths(tree_def: Any) -> list[str]:
    """Returns the path of every leaf of a tree definition.

    Examples:
      >>> leaf_paths(jax.tree.structure({'a': 1, 'b': (2, 3)}))
      ['a', 'b/0', 'b/1']
    """
    tree = jax.tree.unflatten(tree_def, [0] * tree_def.num_leaves)
    return [path_str(path) for path, _ in tree_flatten_with_path(tree)[0]]


def first_lines(lines: Sequence[str]) -> str:
    """Returns the first few lines, indented, and the number of lines omitted.

    Examples:
      >>> print(first_lines(['a', 'b']))
        a
        b
    """
    shown = [f"  {line}" for line in lines[:_SHOWN]]
    rest = len(lines) - _SHOWN
    return "\n".join([*shown, f"  and {rest} more"] if rest > 0 else shown)


def shown(text: str, limit: int = 100) -> str:
    r"""Returns untrusted text, escaped and shortened for an error message.

    Examples:
      >>> shown('mlp/kernel'), shown('a' + chr(10)), shown('abcdef', limit=5)
      ('mlp/kernel', 'a\\n', 'ab...')
    """
    cut = text if len(text) <= limit else text[: limit - 3]
    escaped = cut if cut.isprintable() else repr(cut)[1:-1]
    return escaped if cut is text else escaped + "..."


def different_trees(tree_def: Any, grads_def: Any) -> TreeMismatchError:
    """Returns the error for gradients whose structure differs from that of the parameters."""
    lines = _differences(_example(tree_def), _example(grads_def), ())
    if not lines:
        lines = [f"static data: expected {tree_def}, found {grads_def}"]
    return TreeMismatchError(
        "`grad_tree` does not have the tree structure of the parameters that the optimizer was "
        f"initialized with:\n{first_lines(lines)}\nDifferentiate with respect to "
        "`get_params(opt_state)`, or convert the gradients to the containers of the parameters."
    )


def changed_structure(tree_def: Any, n: int, before: Any, after: Any) -> StateChangedError:
    """Returns the error for an update that changed the structure of a parameter's state."""
    lines = _differences(_example(before), _example(after), ())
    lines = lines or [f"static data: expected {before}, found {after}"]
    return StateChangedError(
        f"the update changed the structure of the state of parameter `{leaf_paths(tree_def)[n]}`:\n"
        f"{first_lines(lines)}\nReturn the same containers as `init` does."
    )


def changed_shape(
    tree_def: Any,
    n: int,
    get_params: Callable[[Any], Any],
    subtree_def: Any,
    old: Sequence[Any],
    new: Sequence[Any],
    grad: Any,
) -> StateChangedError | None:
    """Returns the error for an update that broadcast a parameter to a new shape, if it did.

    Other state arrays may change shape, e.g. a growing history.
    """
    if all(np.shape(a) == np.shape(b) for a, b in zip(old, new, strict=True)):
        return None
    before, after = (np.shape(get_params(jax.tree.unflatten(subtree_def, s))) for s in (old, new))
    if before == after:
        return None
    return StateChangedError(
        f"the update changed parameter `{leaf_paths(tree_def)[n]}` from shape {before} to {after}: "
        f"its gradient has shape {np.shape(grad)}. Pass gradients with the shapes of the "
        "parameters."
    )


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns the key and subtree of each child of a pytree node, or `None` for a leaf.

    As in JAX, `None` is a node without children.

    Examples:
      >>> [(key.key, child) for key, child in children({'b': 1, 'a': (2, 3)})]
      [('a', (2, 3)), ('b', 1)]
      >>> children(None), children(1.0)
      ([], None)
    """
    keyed, _ = tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and not keyed[0][0]:
        return None
    return [(path[0], child) for path, child in keyed]


class _Leaf:
    """Stands for an array."""


def _example(tree_def: Any) -> Any:
    return jax.tree.unflatten(tree_def, [_Leaf()] * tree_def.num_leaves)


def _differences(expected: Any, found: Any, path: tuple[Any, ...]) -> list[str]:
    ours, theirs = children(expected), children(found)
    if ours is None and theirs is None:
        return []
    if ours is None or theirs is None or type(expected) is not type(found):
        return [f"{path_str(path)}: expected {_kind(expected)}, found {_kind(found)}"]
    lines, others = [], {str(key): (key, child) for key, child in theirs}
    for key, child in ours:
        if str(key) in others:
            lines += _differences(child, others.pop(str(key))[1], (*path, key))
        else:
            lines.append(f"{path_str((*path, key))}: expected {_kind(child)}, found nothing")
    for key, child in others.values():
        lines.append(f"{path_str((*path, key))}: expected nothing, found {_kind(child)}")
    if not lines and [key for key, _ in ours] != [key for key, _ in theirs]:
        lines.append(f"{path_str(path)}: same keys in a different order")
    return lines


def _kind(node: Any) -> str:
    if isinstance(node, _Leaf):
        return "an array"
    if node is None:
        return "None"
    name = type(node).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
