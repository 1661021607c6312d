"""How many mini-steps make a step: a number, or a schedule of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MAX = int(np.iinfo(np.int32).max)


def parse_every_k(every_k_schedule: Any) -> int | Callable[[jax.Array], jax.Array]:
    """Returns a positive Python integer, or a function whose values are int32 and at least 1."""
    if callable(every_k_schedule):
        return lambda step: _clamped(every_k_schedule(step))
    _check_scalar("`every_k_schedule` must be", every_k_schedule)
    kind = getattr(every_k_schedule, "dtype", np.dtype(object))
    is_number = isinstance(every_k_schedule, int) and not isinstance(every_k_schedule, bool)
    if not (is_number or jnp.issubdtype(kind, jnp.integer)):
        raise TypeError(
            "`every_k_schedule` must be an integer or a function from the gradient step to one, "
            f"found {every_k_schedule!r}. Give the number of mini-steps that make one step, e.g. 4."
        )
    if isinstance(every_k_schedule, jax.core.Tracer):
        return lambda step: _clamped(every_k_schedule)
    number = int(every_k_schedule)
    if not 1 <= number <= _MAX:
        raise ValueError(
            f"`every_k_schedule` must be at least 1, found {number}; and at most {_MAX}, an int32. "
            "Give the number of mini-steps that make one step; 1 for no accumulation."
        )
    return number


def _clamped(value: Any) -> jax.Array:
    if not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
        raise TypeError(
            "the function `every_k_schedule` must return a number, found "
            f"{type(value).__name__}. Return the number of mini-steps of this gradient step."
        )
    _check_scalar("the function `every_k_schedule` must return", value)
    return jnp.maximum(jnp.asarray(value).astype(jnp.int32), 1)


def _check_scalar(rule: str, value: Any) -> None:
    if np.ndim(value):
        raise ValueError(
            f"{rule} a scalar, found an array of shape {np.shape(value)}. Give one number of "
            "mini-steps."
        )
