"""The accumulator: which dtypes it has, and how one more gradient enters it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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


def add(grads: Any, accumulator: Any, count: jax.Array, *, mean: bool) -> Any:
    """Returns the mean, or the sum, of `grads` and of the `count` gradients accumulated so far.

    Computed in float32 at least, in Optax's order of operations (Welford's mean), and not yet
    rounded to the accumulator's dtype.
    """

    def leaf(grad: Any, total: Any) -> jax.Array:
        kept = jnp.promote_types(jnp.result_type(grad), jnp.result_type(total))
        wide = jnp.promote_types(kept, jnp.float32)
        grad, total = jnp.asarray(grad, wide), jnp.asarray(total, wide)
        result = total + (grad - total) / (count + 1) if mean else grad + total
        return jax.lax.convert_element_type(result, kept)

    return jax.tree.map(leaf, grads, accumulator)


def keep_imaginary(accumulator: Any, grads: Any) -> Any:
    """Makes real leaves complex that are to hold complex gradients; all others stay as they are.

    A state that Optax made accumulates complex gradients in float32, without imaginary parts.
    """

    def leaf(total: Any, grad: Any) -> Any:
        dtype = jnp.result_type(total)
        if not jnp.iscomplexobj(grad) or jnp.issubdtype(dtype, jnp.complexfloating):
            return total
        return jnp.asarray(total, jnp.promote_types(dtype, jnp.complex64))

    return jax.tree.map(leaf, accumulator, grads)


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
