"""Validation of optimizer states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import treedef_children, treedef_is_leaf

from opt_legacy_stax._identity import Identity
from opt_legacy_stax._trees import leaf_paths, shown
from opt_legacy_stax.errors import LayoutError


def is_state(value: Any) -> bool:
    """Whether a value is a packed state, of this module's class, JAX's, or a plain tuple."""
    if not (isinstance(value, tuple) and len(value) == 3 and _is_treedef(value[1])):
        return False
    packed, tree_def, subtree_defs = value
    return (
        all(isinstance(each, tuple | list) for each in (packed, subtree_defs))
        and len(packed) == len(subtree_defs) == tree_def.num_leaves
        and all(map(_is_treedef, subtree_defs))
    )


def check_state(value: Any, optimizer: Identity | None = None) -> None:
    """Checks that a value is a packed state, with the entries of an optimizer if they are known."""
    if not is_state(value):
        raise LayoutError(
            f"`opt_state` must be an OptimizerState; got {shown(type(value).__name__)}. Pass the "
            "state that `init_fn` or `update_fn` returned, as in `update_fn(i, grads, opt_state)`."
        )
    if optimizer is None or not optimizer.keeps:
        return
    for n, subtree_def in enumerate(value[2]):
        found = kept_by(subtree_def)
        if found != len(optimizer.keeps):
            path, kinds = leaf_paths(value[1])[n], {0: "something else", 1: "an array"}
            raise LayoutError(
                f"`opt_state` is not a state of {optimizer}: for parameter `{path}` found "
                f"{kinds.get(found, f'a tuple of {found}')}. Pass a state of this "
                "optimizer; convert states of older JAX versions with `convert_old_layout`."
            )


def kept_by(subtree_def: Any) -> int:
    """Returns the number of entries in a parameter's state: 1 for an array, 0 if not a tuple."""
    if treedef_is_leaf(subtree_def):
        return 1
    children: Sequence[Any] = treedef_children(subtree_def)
    is_tuple = jax.tree.unflatten(subtree_def, [0] * subtree_def.num_leaves).__class__ is tuple
    return len(children) if is_tuple and len(children) > 1 else 0


def _is_treedef(value: Any) -> bool:
    return isinstance(value, jax.tree_util.PyTreeDef)
