"""Optax's conventions, typed: extra arguments, and counts that stay where they would overflow."""

from __future__ import annotations

from typing import Any

import jax
import optax


def with_extra_args(tx: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation that takes extra arguments, whether it uses them or not."""
    if isinstance(tx, optax.GradientTransformationExtraArgs):
        return tx

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        del extra_args
        return tx.update(updates, state, params)

    init_and_update: Any = tx.init, update  # Optax's type of `update` lacks the extra arguments
    return optax.GradientTransformationExtraArgs(*init_and_update)


def incremented(count: Any) -> jax.Array:
    """A count of steps, one more; the largest int32 stays what it is."""
    more: Any = optax.safe_increment(count)
    made: jax.Array = more
    return made
