"""Paths of leaves, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import keystr


def path_str(path: Sequence[Any]) -> str:
    """Returns a JAX key path as `decoder/layers_0/kernel`; the root is `.`.

    Inside of a key `~` is `~0` and `/` is `~1`, as in JSON Pointer (RFC 6901).

    Examples:
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'mlp': {'a/b': [1.0]}})
      >>> path_str(path)
      'mlp/a~1b/0'
    """
    names = (keystr((key,), simple=True) for key in path)
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names) or "."


def leaves_by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, in JAX's order."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {path_str(path): leaf for path, leaf in found}
