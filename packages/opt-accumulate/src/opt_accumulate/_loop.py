"""Running the inner optimizer on the steps that emit, and leaving memory alone on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def emit_if(
    emit: jax.Array, body: Callable[[Any, Any], Any], carry: Any, operands: Any
) -> tuple[jax.Array, Any]:
    """Returns `body(carry, operands)` where `emit` is true, `carry` otherwise."""
    # A loop of no or one trip, whose carry stays in place: `lax.cond` copies what passes through.
    # It is not folded where `emit` is static: XLA would copy the accumulator that it reads.
    limit = emit.astype(jnp.int32)

    def trip(counted: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        count, carry = counted
        return count + 1, body(carry, _tied_to(count, operands))

    trips, carry = lax.while_loop(lambda counted: counted[0] < limit, trip, (jnp.int32(0), carry))
    return trips > 0, carry


def zeros_if(done: jax.Array, tree: Any) -> Any:
    """Returns zeros where `done`, of `emit_if`, is true, `tree` otherwise."""
    # When this overwrites `tree`, all that reads it has been computed: XLA need not copy it.
    return emit_if(done, lambda carry, _: jax.tree.map(jnp.zeros_like, carry), tree, ())[1]


def _tied_to(count: jax.Array, tree: Any) -> Any:
    """Ties arrays to the loop's count: what does not depend on it, XLA computes before the loop."""
    # One by one: what passes a barrier together varies, under `shard_map`, over the same axes.

    def tie(leaf: Any) -> Any:
        return lax.optimization_barrier((count, leaf))[1] if _is_plain_array(leaf) else leaf

    return jax.tree.map(tie, tree)


def _is_plain_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
