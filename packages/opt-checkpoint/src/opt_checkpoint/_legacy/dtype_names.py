"""The dtypes that a file may name: plain numbers and booleans, by NumPy's and ml_dtypes' names."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

_NUMPY = (
    "bool",
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
    "complex64",
    "complex128",
)
# Of JAX's, those that are stored one element in whole bytes.
_JAX = (
    "bfloat16",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
    "uint2",
    "uint4",
)


def dtype_of(name: str) -> np.dtype | None:
    """Returns the dtype of that name, or `None` for any that is no plain number.

    Examples:
      >>> dtype_of('bfloat16').itemsize, dtype_of('object'), dtype_of('V8')
      (2, None, None)
    """
    if name in _NUMPY:
        return np.dtype(name)
    scalar = getattr(jnp, name, None) if name in _JAX else None
    return None if scalar is None else np.dtype(scalar)
