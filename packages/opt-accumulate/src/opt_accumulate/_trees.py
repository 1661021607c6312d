"""Paths of leaves, and trees that stand for larger trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from opt_accumulate.errors import OptionError


def path_str(path: Sequence[Any]) -> str:
    """Returns a JAX key path as `decoder/layers_0/kernel`; the root is `.`.

    Examples:
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'mlp': [1.0]})
      >>> path_str(path)
      'mlp/0'
    """
    return keystr(tuple(path), simple=True, separator="/") or "."


def broadcast_prefix(
    prefix: Any, tree: Any, argument: str, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Returns, for every leaf of `tree`, the leaf of `prefix` at or above it.

    Args:
      prefix: a tree like `tree`, but whose leaves may stand where `tree` has subtrees.
      tree: the larger tree.
      argument: what the error calls `prefix`.
      is_leaf: which nodes of `prefix` are leaves.

    Raises:
      OptionError: `prefix` is no prefix of `tree`.

    Examples:
      >>> broadcast_prefix({'a': 'sum', 'b': 'mean'}, {'a': [1, 2], 'b': 3}, 'aux')
      ['sum', 'sum', 'mean']
    """
    try:
        full = jax.tree.broadcast(prefix, tree, is_leaf)
    except ValueError as error:
        raise OptionError(
            f"`{argument}` must be one value for all, or a tree that begins like "
            f"{jax.tree.structure(tree)}; it is {jax.tree.structure(prefix, is_leaf)}: {error}"
        ) from error
    return jax.tree.leaves(full, is_leaf)
