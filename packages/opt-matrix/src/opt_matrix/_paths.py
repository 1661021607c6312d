"""Paths of leaves, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey, keystr


def path_str(path: Sequence[Any]) -> str:
    """Returns a JAX key path as `decoder/layers_0/kernel`; the root is `.`."""
    # As in JSON Pointer (RFC 6901). The attribute `value` of a box, as of Flax's variables, is left
    # out: a plan, and the rules of `Matrices`, are for trees with and without boxes.
    return full_path_str(path[:-1] if path[-1:] == (_BOXED,) else path)


def full_path_str(path: Sequence[Any]) -> str:
    """Returns a JAX key path with all of its keys."""
    names = (keystr((key,), simple=True) for key in path)
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names) or "."


def leaves_by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, in JAX's order."""
    keyed = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path_str(path): leaf for path, leaf in keyed}


_BOXED = GetAttrKey("value")
