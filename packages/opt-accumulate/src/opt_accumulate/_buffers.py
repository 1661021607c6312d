"""Buffers: zeros of a kind, and states whose leaves each own theirs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def zeros_of(like: Any) -> Any:
    """Returns zeros of the shapes, dtypes and Explicit shardings of a tree of abstract values."""
    return jax.tree.map(jnp.zeros_like, like)


def own_buffers(state: Any, *, apart_from: Any) -> Any:
    """Copies the arrays of `state` that occur twice in it, or in `apart_from`.

    Some optimizers keep the initial parameters in their state: donating both would donate one
    buffer twice, which XLA refuses.

    Examples:
      >>> params = jnp.ones(3)
      >>> own_buffers((params,), apart_from=params)[0] is params
      False
    """
    seen = {id(leaf) for leaf in jax.tree.leaves(apart_from)}

    def own(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)
