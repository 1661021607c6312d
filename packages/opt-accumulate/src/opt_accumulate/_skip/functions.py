"""Optax's two skip functions, with its signatures and its `skip_state`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._alike import traced_once

_MAX = int(np.iinfo(np.int32).max)


def skip_not_finite(
    updates: Any, gradient_step: Any, params: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Skips a mini-step whose gradients hold an inf or a NaN.

    Args:
      updates: the gradients; an empty tree is finite.
      gradient_step: unused.
      params: unused.

    Returns:
      Whether to skip, and a dictionary of it as `should_skip` and of how many values were not
      finite as `num_not_finite`, an int32 that stays at its largest value rather than overflow.

    Examples:
      >>> skip, state = skip_not_finite(jnp.array([1.0, jnp.inf]), 0, None)
      >>> bool(skip), int(state['num_not_finite'])
      (True, 1)
    """
    del gradient_step, params
    # A sum of squares that is finite has no other in it, and is read in one pass; counting takes
    # memory, so it is done only where there may be something to count.
    suspect = ~jnp.isfinite(squared_norm(updates))
    number = jax.lax.cond(suspect, _count_all, lambda _: suspect.astype(jnp.int32), updates)
    should_skip = number > 0
    return should_skip, {"should_skip": should_skip, "num_not_finite": number}


def skip_large_updates(
    updates: Any, gradient_step: Any, params: Any, max_squared_norm: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Skips a mini-step whose gradients have a large norm, or one that is NaN.

    Args:
      updates: the gradients.
      gradient_step: unused.
      params: unused.
      max_squared_norm: the squared global norm from which on to skip.

    Returns:
      Whether to skip, and a dictionary of it as `should_skip` and of the squared global norm as
      `norm_squared`, in float32 at least.

    Examples:
      >>> skip, state = skip_large_updates(jnp.array([3.0, 4.0]), 0, None, max_squared_norm=25.0)
      >>> bool(skip), float(state['norm_squared'])
      (True, 25.0)
    """
    del gradient_step, params
    norm_squared = squared_norm(updates)
    should_skip = jnp.logical_not(norm_squared < max_squared_norm)
    return should_skip, {"should_skip": should_skip, "norm_squared": norm_squared}


def squared_norm(tree: Any) -> jax.Array:
    """Returns the squared global norm, a real scalar of float32 at least; 0 for an empty tree.

    Examples:
      >>> float(squared_norm([jnp.float16(300.0), jnp.complex64(3 + 4j)]))  # float16 ends at 65504
      90025.0
    """
    squares = list(map(traced_once(_sum_of_squares, tree), jax.tree.leaves(tree)))
    return jnp.sum(jnp.array(squares)) if squares else jnp.zeros([], jnp.float32)


def _sum_of_squares(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    if jnp.iscomplexobj(leaf):
        return jnp.sum(jnp.real(leaf) ** 2 + jnp.imag(leaf) ** 2)
    return jnp.sum(jnp.square(leaf))


def _count_all(tree: Any) -> jax.Array:
    counts = map(traced_once(_count_not_finite, tree), jax.tree.leaves(tree))
    return functools.reduce(_saturating_add, counts, jnp.zeros([], jnp.int32))


def _count_not_finite(leaf: Any) -> jax.Array:
    """Counts in int32: an all-NaN array of 2**32 values must not come out as none."""
    mask = jnp.logical_not(jnp.isfinite(leaf))
    if mask.size <= _MAX:
        return jnp.sum(mask, dtype=jnp.int32)
    rows = jnp.sum(mask, axis=-1, dtype=jnp.int32)
    few = jnp.sum(rows.astype(jnp.float32)) < _MAX / 2
    return jnp.where(few, jnp.sum(rows), _MAX)


def _saturating_add(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.where(a > _MAX - b, _MAX, a + b)
