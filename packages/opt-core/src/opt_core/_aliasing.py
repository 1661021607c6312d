"""Donation needs every leaf to own its buffer."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp


def unalias(tree: Any, *, apart_from: Any = ()) -> Any:
    """Copies every array of `tree` that has already occurred, in `tree` itself or in `apart_from`.

    Some optimizers keep the initial parameters in their state. Donating parameters and state then
    donates one buffer twice, which XLA refuses.

    Args:
      tree: any pytree. NumPy arrays are left as they are.
      apart_from: a pytree whose arrays must not be shared either.

    Returns:
      `tree`, where no two `jax.Array` leaves share a buffer.

    Examples:
      >>> x = jnp.ones(3)
      >>> a, b = unalias((x, x))
      >>> a is x, b is x
      (True, False)
    """
    seen: set[int] = set().union(*map(_buffers, jax.tree.leaves(apart_from)))

    def own(leaf: Any) -> Any:
        buffers = _buffers(leaf)
        if not buffers.isdisjoint(seen):
            return jnp.copy(leaf)
        seen.update(buffers)
        return leaf

    return jax.tree.map(own, tree)


def _buffers(leaf: Any) -> Set[int]:
    """The buffers of an array; a tracer counts as one, since `vmap` may return it unchanged."""
    if not isinstance(leaf, jax.Array):
        return frozenset()
    if isinstance(leaf, jax.core.Tracer) or leaf.is_deleted():
        return {id(leaf)}
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}
