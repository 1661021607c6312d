"""Optax's two skip functions, with its signatures and its `skip_state`."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    # Counting takes memory, so it is done only where there is something to count.
    suspect = ~all_finite(updates)
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
    return _total(_sum_of_squares, tree)


def global_norm(tree: Any) -> jax.Array:
    """Returns the global norm in float32, which is finite if and only if all values are.

    One read, and a second one only where the squares add up to infinity: of values whose squares
    overflow, or that are infinite. What is more than float32 has comes out as its largest number.

    Examples:
      >>> [f'{global_norm([jnp.array(values)]):.3g}' for values in ([3e30, 4e30], [jnp.inf])]
      ['5e+30', 'inf']
    """
    squared = squared_norm(tree)
    # The squares of what is left of the largest values are far from overflow, the sum of them is,
    # too; that of values which matter beside those is far from 0.
    shrunk = 2.0 ** -(jnp.finfo(squared.dtype).maxexp // 2 + 16)
    # No constant: of a single number XLA would square that and the factor apart, to inf and 0.
    factor = jnp.where(jnp.isinf(squared), shrunk, 1.0).astype(squared.dtype)

    def again(tree: Any, factor: jax.Array) -> jax.Array:
        total = _total(_sum_of_squares, tree, factor)
        return _to_float32(jnp.sqrt(total), 1 / shrunk)

    def once(*_: Any) -> jax.Array:
        return _to_float32(jnp.sqrt(squared), 1.0)

    norm: jax.Array = jax.lax.cond(jnp.isinf(squared), again, once, tree, factor)
    return norm


def all_finite(tree: Any) -> jax.Array:
    """Returns whether no value is inf or NaN, by one sum: it costs what a norm costs.

    Examples:
      >>> bool(all_finite([jnp.float32(3e38)] * 2)), bool(all_finite([jnp.array([jnp.inf, 0.0])]))
      (True, False)
    """
    return jnp.isfinite(_total(_sum_of_differences, tree))


def _total(function: Callable[..., jax.Array], tree: Any, *further: jax.Array) -> jax.Array:
    summed = traced_once(function, tree)
    sums = [summed(leaf, *further) for leaf in jax.tree.leaves(tree)]
    return jnp.sum(jnp.array(sums)) if sums else jnp.zeros([], jnp.float32)


def _sum_of_squares(leaf: Any, factor: jax.Array | float = 1.0) -> jax.Array:
    squares = [jnp.square(part * factor) for part in _parts(leaf)]
    return jnp.sum(functools.reduce(jnp.add, squares))


def _sum_of_differences(leaf: Any) -> jax.Array:
    """A sum of zeros, but of NaN for inf and NaN: it has no squares that could overflow."""
    return jnp.sum(functools.reduce(jnp.add, [part - part for part in _parts(leaf)]))


def _parts(leaf: Any) -> list[jax.Array]:
    """The real numbers of a leaf, in float32 at least."""
    leaf = jnp.asarray(leaf)
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _to_float32(value: jax.Array, factor: float) -> jax.Array:
    """The product, or the largest number of float32 where that is less."""
    most = float(jnp.finfo(jnp.float32).max)
    fits = jnp.minimum(value, most / factor) * factor
    return jnp.where(jnp.isfinite(value), fits, value).astype(jnp.float32)


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
