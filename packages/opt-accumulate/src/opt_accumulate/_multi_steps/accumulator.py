"""The accumulator: which dtypes it has, and how one more gradient enters it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._alike import traced_once


def zeros_for(params: Any, dtype: Any) -> Any:
    """Returns an empty accumulator.

    Args:
      params: what the gradients look like.
      dtype: what to accumulate in; `None` for each parameter's own dtype. float32 means float32 at
        least: float64 is not truncated. A complex leaf gets the complex dtype of that precision.

    Returns:
      Zeros like `params`.

    Examples:
      >>> params = {'a': jnp.ones(2, jnp.bfloat16), 'b': jnp.ones(2, jnp.complex64)}
      >>> jax.tree.map(lambda x: str(x.dtype), zeros_for(params, jnp.float32))
      {'a': 'float32', 'b': 'complex64'}
    """
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_dtype_for(p, dtype)), params)


def accumulate(
    grads: Any, accumulator: Any, count: jax.Array, skip: jax.Array | None, *, mean: bool
) -> Any:
    """Returns the accumulator with one more gradient in it, in its own dtypes.

    Args:
      grads: the gradients.
      accumulator: the mean, or the sum, of those before.
      count: how many these are.
      skip: where true, the accumulator stays as it is; `None` for never.
      mean: whether it is a mean.
    """

    def accumulate_leaf(grad: Any, total: Any, count: jax.Array, skip: jax.Array | None) -> Any:
        old = _keep_imaginary(total, grad)
        new = jax.lax.convert_element_type(add(grad, old, count, mean=mean), jnp.result_type(old))
        return new if skip is None else jnp.where(skip, old, new)

    leaf = traced_once(accumulate_leaf, grads, accumulator, count)
    return jax.tree.map(lambda grad, total: leaf(grad, total, count, skip), grads, accumulator)


def add(grad: Any, total: Any, count: jax.Array, *, mean: bool) -> jax.Array:
    """Returns the mean, or the sum, of a gradient and of the `count` gradients before it.

    Computed in float32 at least, in Optax's order of operations (Welford's mean), and not yet
    rounded to the accumulator's dtype.
    """
    kept = jnp.promote_types(jnp.result_type(grad), jnp.result_type(total))
    wide = jnp.promote_types(kept, jnp.float32)
    grad, total = jnp.asarray(grad, wide), jnp.asarray(total, wide)
    result = total + (grad - total) / (count + 1) if mean else grad + total
    return jax.lax.convert_element_type(result, kept)


def _keep_imaginary(total: Any, grad: Any) -> Any:
    """Makes a real leaf complex that is to hold complex gradients; others stay as they are.

    A state that Optax made accumulates complex gradients in float32, without imaginary parts.
    """
    dtype = jnp.result_type(total)
    if not jnp.iscomplexobj(grad) or jnp.issubdtype(dtype, jnp.complexfloating):
        return total
    return jnp.asarray(total, jnp.promote_types(dtype, jnp.complex64))


def _dtype_for(leaf: Any, dtype: Any) -> np.dtype[Any]:
    own = jnp.result_type(leaf)
    if dtype is None:
        return own
    wanted = jax.dtypes.canonicalize_dtype(dtype)
    if jnp.issubdtype(own, jnp.complexfloating):
        wanted = jnp.promote_types(wanted, jnp.complex64)
    if jnp.finfo(wanted).bits >= 32 and jnp.issubdtype(own, jnp.inexact):
        wanted = jnp.promote_types(wanted, own)
    return wanted
