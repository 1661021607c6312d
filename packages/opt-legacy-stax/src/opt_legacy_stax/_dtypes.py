"""States keep the dtypes that they were initialized with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def strong_param(x: Any) -> Any:
    """Returns a parameter without weak type.

    Weakly typed arrays and Python floats become strongly typed arrays. The first update would do
    the same, and a jitted update would then compile a second time. Anything else is returned
    unchanged.
    """
    is_weak_array = isinstance(x, jax.Array) and x.aval.weak_type
    is_python_number = type(x) in (float, complex)
    if is_weak_array or is_python_number:
        return jax.lax.convert_element_type(x, jnp.result_type(x))
    return x


def keep_dtypes(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """Returns the leaves of `new`, cast to the dtypes of `old`.

    Casts only from real to real and from complex to complex floating-point dtypes: a float that an
    update made of an integer, or a complex number of a real one, cannot be rounded back. PRNG keys
    are left alone. Only the dtypes of `old` are used, so `jax.ShapeDtypeStruct` leaves will do.
    """
    return [_keep_dtype(*pair) for pair in zip(old, new, strict=True)]


def _keep_dtype(old: Any, new: Any) -> Any:
    has_dtype = isinstance(old, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)
    if not has_dtype or not isinstance(new, jax.Array) or _is_key(old) or _is_key(new):
        return new
    dtype = jax.dtypes.canonicalize_dtype(old.dtype)
    if dtype == new.dtype:
        return new
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(dtype, kind) and jnp.issubdtype(new.dtype, kind):
            return new.astype(dtype)
    return new


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))
