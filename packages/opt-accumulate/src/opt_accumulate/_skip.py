"""Norms of gradients and whether they are finite, by one read each; Optax's two skip functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._arrays import inexact, traced_once
from opt_accumulate._inner import emit_if

_MAX = int(np.iinfo(np.int32).max)
_DECISION = "should_skip"


def squared_norm(tree: Any) -> jax.Array:
    """Returns the squared global norm, a real scalar of float32 at least; 0 for an empty tree."""
    return total(_sum_of_squares, tree)


def global_norm(tree: Any) -> jax.Array:
    """Returns the global norm in float32, which is finite if and only if all values are."""
    norm, most = jnp.sqrt(squared_norm(tree)), float(jnp.finfo(jnp.float32).max)

    def again(norm: jax.Array, tree: Any) -> jax.Array:
        return jnp.where(all_finite(tree), most, jnp.full_like(norm, jnp.nan))

    # Read twice only where squares overflow; of a `lax.cond`, XLA for GPUs would compute both.
    _, norm = emit_if(jnp.isinf(norm), again, norm, tree)
    return jnp.minimum(norm, most).astype(jnp.float32)


def all_finite(tree: Any) -> jax.Array:
    """Returns whether no value is inf or NaN, by one sum: it costs what a norm costs."""
    return jnp.isfinite(total(_sum_of_differences, tree))


def total(function: Callable[[Any], jax.Array], tree: Any) -> jax.Array:
    """Returns the sum of a function of each leaf; 0 for an empty tree."""
    sums = list(map(traced_once(function, tree), jax.tree.leaves(tree)))
    return jnp.sum(jnp.array(sums)) if sums else jnp.zeros([], jnp.float32)


def _sum_of_squares(leaf: Any) -> jax.Array:
    return jnp.sum(functools.reduce(jnp.add, map(jnp.square, _parts(leaf))))


def _sum_of_differences(leaf: Any) -> jax.Array:
    """A sum of zeros, but of NaN for inf and NaN: it has no squares that could overflow."""
    return jnp.sum(functools.reduce(jnp.add, [part - part for part in _parts(leaf)]))


def _parts(leaf: Any) -> list[jax.Array]:
    """The real numbers of a leaf, in float32 at least."""
    leaf = jnp.asarray(leaf)
    leaf = leaf.astype(inexact(leaf.dtype))
    return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


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
    should_skip = ~all_finite(updates)

    def count(tree: Any) -> jax.Array:
        number = total(_not_finite, tree)
        return jnp.where(number < _MAX, number.astype(jnp.int32), _MAX)

    # Counting takes memory, so it is done only where there is something to count.
    number = jax.lax.cond(should_skip, count, lambda _: should_skip.astype(jnp.int32), updates)
    return should_skip, {_DECISION: should_skip, "num_not_finite": number}


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
    return should_skip, {_DECISION: should_skip, "norm_squared": norm_squared}


def ask(
    function: Any, updates: Any, gradient_step: jax.Array, params: Any
) -> tuple[jax.Array, Any]:
    """Returns the checked decision of a skip function, and its state, which always holds it."""
    returned = function(updates, gradient_step, params)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            "`should_skip_update_fn` must return (skip, state), found "
            f"{type(returned).__name__}. Without a state, return (skip, ())."
        )
    skip, state = returned
    if np.shape(skip) or jnp.result_type(skip) != jnp.bool_:
        raise ValueError(
            "`should_skip_update_fn` must return a boolean scalar first, found an array of dtype "
            f"{jnp.result_type(skip)} and shape {np.shape(skip)}. Reduce it, e.g. with `jnp.any`."
        )
    skip = jnp.asarray(skip)
    return skip, state if last_decision(state) is not None else {
        _DECISION: skip,
        "skip_state": state,
    }


def last_decision(skip_state: Any) -> Any:
    """Returns whether the last mini-step was skipped; `None` if the state does not say."""
    return skip_state.get(_DECISION) if isinstance(skip_state, Mapping) else None


def _not_finite(leaf: Any) -> jax.Array:
    # In float32, which is exact to 2**24 and does not wrap: 2**32 NaNs must not be 0.
    return jnp.sum(jnp.logical_not(jnp.isfinite(leaf)), dtype=jnp.float32)
