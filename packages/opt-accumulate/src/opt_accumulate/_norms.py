"""Global norms, and whether all values are finite: one read of the gradients each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from opt_accumulate._arrays import traced_once


def squared_norm(tree: Any) -> jax.Array:
    """Returns the squared global norm, a real scalar of float32 at least; 0 for an empty tree."""
    return total(_sum_of_squares, tree)


def global_norm(tree: Any) -> jax.Array:
    """Returns the global norm in float32, which is finite if and only if all values are."""
    # Read twice only where the squares add up to infinity. What is more than float32 has comes out
    # as its largest number.
    squared = squared_norm(tree)
    # The squares of what is left of the largest values are far from overflow, the sum of them is,
    # too; that of values which matter beside those is far from 0.
    shrunk = 2.0 ** -(jnp.finfo(squared.dtype).maxexp // 2 + 16)
    # No constant: of a single number XLA would square that and the factor apart, to inf and 0.
    factor = jnp.where(jnp.isinf(squared), shrunk, 1.0).astype(squared.dtype)

    def again(tree: Any, factor: jax.Array) -> jax.Array:
        return _to_float32(jnp.sqrt(total(_sum_of_squares, tree, factor)), 1 / shrunk)

    def once(*_: Any) -> jax.Array:
        return _to_float32(jnp.sqrt(squared), 1.0)

    norm: jax.Array = jax.lax.cond(jnp.isinf(squared), again, once, tree, factor)
    return norm


def all_finite(tree: Any) -> jax.Array:
    """Returns whether no value is inf or NaN, by one sum: it costs what a norm costs."""
    return jnp.isfinite(total(_sum_of_differences, tree))


def total(function: Callable[..., jax.Array], tree: Any, *further: jax.Array) -> jax.Array:
    """Returns the sum of a function of each leaf; 0 for an empty tree."""
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
