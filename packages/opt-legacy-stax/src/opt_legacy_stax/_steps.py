"""Validation and arithmetic of steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax.errors import StepError

INT32_MIN, INT32_MAX = (int(end) for end in (np.iinfo(np.int32).min, np.iinfo(np.int32).max))


def check_step(i: Any) -> Any:
    """Returns a step in the form that updates and schedules expect.

    Python and NumPy integers become Python integers, clamped to the range of int32, and booleans
    become 0 and 1. Floats and other JAX arrays, traced or not, are returned unchanged.
    """
    if callable(i):
        name = getattr(i, "__name__", type(i).__name__)
        raise StepError(
            f"`i` must be the step number; got the function `{name}`. Call `update(i, grads, "
            "state)`: the step comes first."
        )
    if isinstance(i, int | np.integer | np.bool_):
        return max(INT32_MIN, min(int(i), INT32_MAX))
    if isinstance(i, float | np.floating):
        return i
    if not isinstance(i, np.ndarray | jax.Array):
        raise StepError(
            "`i` must be the step number, as a Python, NumPy or JAX scalar; got "
            f"{type(i).__name__}. Call `update(i, grads, state)`: the step comes first."
        )
    if i.ndim != 0:
        raise StepError(
            f"`i` must be a scalar; got an array of shape {i.shape}. Index it, or map the update "
            "over it with `jax.vmap` or `jax.lax.scan`."
        )
    if i.dtype == jnp.bool_:
        return check_step(i[()]) if isinstance(i, np.ndarray) else i.astype(jnp.int32)
    if not (jnp.issubdtype(i.dtype, jnp.integer) or jnp.issubdtype(i.dtype, jnp.floating)):
        raise StepError(f"`i` must be an integer or a float; got an array of dtype {i.dtype}.")
    return check_step(i[()]) if isinstance(i, np.ndarray) else i


def whole_step(i: Any) -> Any:
    """Returns a number of updates as an int32 scalar."""
    step = check_step(i)
    if isinstance(step, float | np.floating) and not float(step).is_integer():
        raise StepError(f"`i` must be a number of updates; got {float(step)}. Pass a whole number.")
    if not isinstance(step, jax.core.Tracer) and step < 0:
        raise StepError(f"`i` must be a number of updates; got {step}. Pass 0 or more.")
    return jnp.asarray(step, jnp.int32)


def next_step(i: Any) -> Any:
    """Returns `i + 1`, or `i` if the integer would overflow; Python integers become arrays.

    An exponent that is an array is not a compile-time constant, so steps share one program.
    """
    if isinstance(i, int):
        return jnp.int32(min(i, INT32_MAX - 1) + 1)
    if isinstance(i, jax.Array) and jnp.issubdtype(i.dtype, jnp.integer):
        return jnp.minimum(i, jnp.iinfo(i.dtype).max - 1) + 1
    return i + 1
