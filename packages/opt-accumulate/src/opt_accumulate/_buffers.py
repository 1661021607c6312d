"""Buffers: zeros of a kind, and states whose leaves each own theirs."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp


def zeros_of(like: Any) -> Any:
    """Returns zeros of the shapes, dtypes and Explicit shardings of a tree of abstract values."""
    return jax.tree.map(jnp.zeros_like, like)


def own_buffers(state: Any, *, apart_from: Any) -> Any:
    """Copies the arrays of `state` whose memory occurs before in it, or in `apart_from`.

    Some optimizers keep the initial parameters in their state: donating both would donate one
    buffer twice, which XLA refuses. Two arrays may share memory without being the same object:
    `jax.device_put` to where an array lies, or to more devices, makes such.

    Examples:
      >>> params = jnp.ones(3)
      >>> own_buffers((params,), apart_from=params)[0] is params
      False
    """
    seen: set[int] = set().union(*map(_buffers, jax.tree.leaves(apart_from)))

    def own(leaf: Any) -> Any:
        buffers = _buffers(leaf)
        if not buffers.isdisjoint(seen):
            return jnp.copy(leaf)
        seen.update(buffers)
        return leaf

    return jax.tree.map(own, state)


def _buffers(leaf: Any) -> Set[int]:
    """Returns where the memory of an array is: one address for each shard of this process."""
    if not isinstance(leaf, jax.Array):
        return frozenset()
    if isinstance(leaf, jax.core.Tracer) or leaf.is_deleted():
        return {id(leaf)}
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
