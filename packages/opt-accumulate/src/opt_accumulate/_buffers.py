"""Buffers: zeros, states whose leaves each own theirs, and arrays in host memory."""

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


def on_device(leaf: Any) -> Any:
    """Returns an array in the memory of its devices; one that is there already as it is."""
    return jax.device_put(leaf, jax.memory.Space.Device) if _is_on_host(leaf) else leaf


def put_beside(leaf: Any, other: Any) -> Any:
    """Returns an array of device memory where `other` lies: on the host, if that does."""
    return jax.device_put(leaf, jax.memory.Space.Host) if _is_on_host(other) else leaf


def _is_on_host(leaf: Any) -> bool:
    # Explicit in types: operations on arrays of two memories are errors.
    if not isinstance(leaf, jax.Array):
        return False
    return bool(jax.typeof(leaf).memory_space == jax.memory.Space.Host)
