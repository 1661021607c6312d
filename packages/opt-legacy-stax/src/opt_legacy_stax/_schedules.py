"""Step sizes as functions of the step `i`, which counts updates from 0 and may be traced."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax.errors import BoundariesError, ScheduleError

Schedule = Callable[[Any], Any]


def constant(step_size: Any) -> Schedule:
    """Returns a schedule that is `step_size` at every step.

    Examples:
      >>> constant(0.1)(1000)
      0.1
    """
    return lambda i: step_size


def exponential_decay(step_size: Any, decay_steps: Any, decay_rate: Any) -> Schedule:
    """Returns `step_size * decay_rate ** (i / decay_steps)`, as a function of the step `i`.

    Examples:
      >>> exponential_decay(0.1, decay_steps=10, decay_rate=0.5)(20)
      0.025
    """
    return lambda i: step_size * decay_rate ** (i / decay_steps)


def inverse_time_decay(
    step_size: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    *,
    upstream_numerics: bool = False,
) -> Schedule:
    """Returns `step_size / (1 + decay_rate * i / decay_steps)`, as a function of the step `i`.

    Args:
      step_size: the step size of the first update.
      decay_steps: number of steps over which the denominator grows by `decay_rate`.
      decay_rate: see `decay_steps`.
      staircase: whether `i / decay_steps` is rounded down.
      upstream_numerics: whether to compute exactly like JAX's module, where the product of an
        integer `decay_rate` and an integer array overflows.

    Examples:
      >>> inverse_time_decay(0.1, decay_steps=10, decay_rate=1.0)(10)
      0.05
    """

    def schedule(i: Any) -> Any:
        if staircase:
            return step_size / (1 + decay_rate * jnp.floor(i / decay_steps))
        overflows = isinstance(decay_rate, int) and isinstance(i, jax.Array)
        rate = float(decay_rate) if overflows and not upstream_numerics else decay_rate
        return step_size / (1 + rate * i / decay_steps)

    return schedule


def polynomial_decay(
    step_size: Any,
    decay_steps: Any,
    final_step_size: Any,
    power: Any = 1.0,
    *,
    upstream_numerics: bool = False,
) -> Schedule:
    """Returns a polynomial decay from `step_size` to `final_step_size`.

    ```
    (step_size - final_step_size) * (1 - min(i, decay_steps) / decay_steps) ** power
        + final_step_size
    ```

    Args:
      step_size: the step size of the first update.
      decay_steps: number of steps until `final_step_size` is reached, after which it is constant.
      final_step_size: the final step size.
      power: the exponent.
      upstream_numerics: whether to compute exactly like JAX's module, where a decay over 0 steps is
        NaN and, under `jit`, a decay of fractional `power` may be NaN or wrong after its end.

    Examples:
      >>> schedule = polynomial_decay(0.1, decay_steps=10, final_step_size=0.02, power=0.5)
      >>> round(float(schedule(10)), 6), round(float(jax.jit(schedule)(11)), 6)
      (0.02, 0.02)
    """
    is_whole = isinstance(power, int | float) and float(power).is_integer()
    # XLA multiplies by the reciprocal: `1 - 7 * (1 / 7)` is negative, and its power NaN, while
    # `1 - 25 * (1 / 25)` is positive.
    is_safe = is_whole and not (isinstance(decay_steps, int | float) and decay_steps == 0)

    def schedule(step_num: Any) -> Any:
        step_num = jnp.minimum(step_num, decay_steps)
        left = 1 - step_num / decay_steps
        if not is_safe and not upstream_numerics:
            left = jnp.where(step_num < decay_steps, jnp.maximum(left, 0), 0)
        return left**power * (step_size - final_step_size) + final_step_size

    return schedule


def piecewise_constant(boundaries: Any, values: Any) -> Schedule:
    """Returns `values[n]`, where `n` is the number of boundaries less than `i`.

    Args:
      boundaries: increasing steps, of shape `(n,)`.
      values: step sizes, of shape `(n + 1,)`. `values[0]` applies up to and including step
        `boundaries[0]`.

    Raises:
      BoundariesError: `boundaries` or `values` is not one-dimensional, or the lengths do not match.

    Examples:
      >>> schedule = piecewise_constant([3, 7], [0.1, 0.03, 0.01])
      >>> [round(float(schedule(i)), 2) for i in (3, 4, 8)]
      [0.1, 0.03, 0.01]
    """
    boundaries, values = jnp.array(boundaries), jnp.array(values)
    if not boundaries.ndim == values.ndim == 1 or boundaries.size != values.size - 1:
        raise BoundariesError(
            "`boundaries` and `values` must be one-dimensional, and `values` must have one entry "
            f"more; got shapes {boundaries.shape} and {values.shape}. Pass one step size up to "
            "each boundary and one for after the last."
        )
    return lambda i: values[jnp.sum(i > boundaries)]


def make_schedule(scalar_or_schedule: Any) -> Schedule:
    """Returns a schedule for a step size: functions are returned as is, numbers become constants.

    Args:
      scalar_or_schedule: a function of the step, a number (including `fractions.Fraction`), or a
        scalar array.

    Raises:
      ScheduleError: `scalar_or_schedule` is anything else.

    Examples:
      >>> make_schedule(0.1)(0)
      0.1
    """
    if callable(scalar_or_schedule):
        return scalar_or_schedule  # type: ignore[no-any-return]
    is_array = isinstance(scalar_or_schedule, np.ndarray | jax.Array)
    if is_array or isinstance(scalar_or_schedule, int | float | complex | np.number | np.bool_):
        if np.ndim(scalar_or_schedule) == 0:
            return constant(scalar_or_schedule)
        found = f"an array of shape {scalar_or_schedule.shape}"
    elif isinstance(scalar_or_schedule, numbers.Real):
        return constant(float(scalar_or_schedule))  # a `Fraction` cannot be multiplied by an array
    else:
        found = type(scalar_or_schedule).__name__
    raise ScheduleError(
        f"`step_size` must be a number or a function of the step; got {found}. For a list of "
        "values use `piecewise_constant`."
    )
