"""Weak types change the first time they meet a strong one, and then everything compiles again."""

from __future__ import annotations

from typing import Any

import jax


def strong_type(leaf: Any) -> Any:
    """Returns an array without its weak type; anything else as it is."""
    if getattr(leaf, "weak_type", False):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(weak_type=False)
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def strong_types(tree: Any) -> Any:
    """Returns `tree` without weak types.

    Examples:
      >>> import jax.numpy as jnp
      >>> jnp.asarray(1.0).weak_type, strong_types([jnp.asarray(1.0)])[0].weak_type
      (True, False)
    """
    return jax.tree.map(strong_type, tree)
