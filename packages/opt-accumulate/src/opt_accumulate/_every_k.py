"""How many mini-steps make a step: a number, or a schedule of numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MAX = int(np.iinfo(np.int32).max)


def parse_every_k(every_k_schedule: Any) -> int | Callable[[jax.Array], jax.Array]:
    """Returns a positive Python integer, or a function whose values are int32 and at least 1.

    Examples:
      >>> parse_every_k(np.int64(4))
      4
      >>> int(parse_every_k(lambda step: 2 * step)(jnp.int32(0)))  # 0 would never emit
      1
    """
    if isinstance(every_k_schedule, jax.core.Tracer):
        _check_integer(every_k_schedule)
        return lambda step: _clamp(every_k_schedule)
    if callable(every_k_schedule):
        return lambda step: _clamp(every_k_schedule(step))
    _check_integer(every_k_schedule)
    number = operator.index(every_k_schedule)
    if not 1 <= number <= _MAX:
        raise ValueError(
            f"`every_k_schedule` must be at least 1, found {number}; and at most {_MAX}, an int32. "
            "Give the number of mini-steps that make one step; 1 for no accumulation."
        )
    return number


def _check_integer(value: Any) -> None:
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    if is_array and np.ndim(value):
        raise ValueError(
            f"`every_k_schedule` must be a scalar, found an array of shape {np.shape(value)}. "
            "Give one integer, or a function from the gradient step to one."
        )
    if is_array:
        is_integer = jnp.issubdtype(value.dtype, jnp.integer)
        found = f"an array of dtype {value.dtype}"
    else:
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        found = repr(value)
    if not is_integer:
        raise TypeError(
            "`every_k_schedule` must be an integer or a function from the gradient step to one, "
            f"found {found}. Give the number of mini-steps that make one step, e.g. 4."
        )


def _clamp(value: Any) -> jax.Array:
    if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
        raise TypeError(
            "the function `every_k_schedule` must return a number, found "
            f"{type(value).__name__}. Return the number of mini-steps of this gradient step."
        )
    if np.shape(value):
        raise ValueError(
            "the function `every_k_schedule` must return a scalar, found an array of shape "
            f"{np.shape(value)}. Return the number of mini-steps of this gradient step."
        )
    return jnp.maximum(jnp.asarray(value).astype(jnp.int32), 1)
