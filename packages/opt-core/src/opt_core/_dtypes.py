"""What JAX makes of dtypes: 64 bits are 32 without `jax_enable_x64`, and some types are weak.

Weak types change the first time they meet a strong one, and then everything compiles again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def held_dtype(array: Any) -> Any:
    """Returns the dtype of an array as JAX holds it.

    Without `jax_enable_x64` that is 32 bits for the 64 of NumPy; an array of JAX has what it has.

    Examples:
      >>> held_dtype(np.zeros(2, np.float64)) == jnp.zeros(2, float).dtype
      True
    """
    if isinstance(array, jax.Array) or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array.dtype
    return jax.dtypes.canonicalize_dtype(array.dtype)


def first_lost(before: np.ndarray, after: np.ndarray) -> Any:
    """Returns the first value that did not survive a conversion within its kind, if any.

    Integers survive exactly. Floats are rounded; what is finite stays finite, and what is not 0
    does not become 0, unless it was subnormal already.

    Examples:
      >>> wide = np.array([1.0, 0.1, 1e300])
      >>> float(first_lost(wide, np.array([1.0, 0.1, np.inf], np.float32)))
      1e+300
    """
    if not jnp.issubdtype(before.dtype, jnp.inexact):
        survives = after.astype(before.dtype) == before
    else:
        is_tiny = np.abs(before) < jnp.finfo(before.dtype).tiny
        survives = ~np.isfinite(before) | (np.isfinite(after) & ((after != 0) | is_tiny))
    return None if np.all(survives) else np.extract(~survives, before)[0]


def convert_held(array: np.ndarray, dtype: Any) -> tuple[np.ndarray, Any]:
    """Returns an array in another dtype of its kind, and the first value that is lost or `None`."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        converted = array.astype(dtype)
    return converted, first_lost(array, converted)


def strong_type(leaf: Any) -> Any:
    """Returns an array without its weak type; anything else as it is."""
    if getattr(leaf, "weak_type", False):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(weak_type=False)
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def strong_types(tree: Any) -> Any:
    """Returns `tree` without weak types.

    Examples:
      >>> import jax.numpy as jnp
      >>> jnp.asarray(1.0).weak_type, strong_types([jnp.asarray(1.0)])[0].weak_type
      (True, False)
    """
    return jax.tree.map(strong_type, tree)
