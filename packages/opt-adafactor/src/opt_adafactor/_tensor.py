"""The mathematics of Adafactor for a single tensor, as pure functions.

Notation follows Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
(2018, https://arxiv.org/abs/1804.04235), generalized as in T5X: rows and columns may be several
dimensions each, and batch dimensions are never averaged over, so that every layer of a stack is
treated as a separate tensor.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opt_adafactor._factoring import Factoring
from opt_adafactor._state import Slots


class Scalars(NamedTuple):
    """The scalars of one step, shared by all tensors; `None` disables a feature.

    Python numbers and weakly typed arrays take the dtype of the array they are multiplied with.

    Attributes:
      learning_rate: the learning rate.
      beta2: float32; decay rate of the second moments.
      complement2: float32; `1 - beta2`.
      epsilon1: added to squared gradients.
      epsilon2: minimum parameter scale.
      max_scale: maximum parameter scale.
      clipping: maximum root mean square of an update.
      beta1: decay rate of the momentum.
      complement1: `1 - beta1`.
    """

    learning_rate: Any
    beta2: Any
    complement2: Any
    epsilon1: Any
    epsilon2: Any
    max_scale: Any
    clipping: Any
    beta1: Any
    complement1: Any


def decay_rate_pow(step: Any, exponent: Any = 0.8) -> jax.Array:
    """Returns `1 - (step + 1)**-exponent`, the decay of the second moments; 0 before step 0.

    Args:
      step: number of updates included in the statistics; scalar.
      exponent: the `decay_rate`; scalar.

    Returns:
      A float32 scalar.

    Examples:
      >>> [round(float(decay_rate_pow(step)), 4) for step in (-3, 0, 1, 1000)]
      [0.0, 0.0, 0.4257, 0.996]
    """
    # Cast before the addition: a step of 2^31 - 1 would overflow in int32.
    number = jnp.maximum(jnp.asarray(step).astype(jnp.float32), 0.0) + 1.0
    return 1.0 - number ** -jnp.asarray(exponent).astype(jnp.float32)


def scaled_update(
    param: jax.Array,
    grad: jax.Array,
    slots: Slots,
    scalars: Scalars,
    scale_by_param: Any,
    factoring: Factoring,
) -> tuple[jax.Array, Slots]:
    """Returns the update to subtract from a parameter, without weight decay.

    Args:
      param: the parameter, used only for its scale.
      grad: its gradient.
      slots: its statistics.
      scalars: the scalars of this step.
      scale_by_param: whether the learning rate is relative to the parameter's root mean square.
      factoring: the factoring of the parameter; static.

    Returns:
      The update, in float32 or wider, and the new statistics.
    """
    grad = grad.astype(jnp.float32)
    squares = jnp.square(grad) + _like(scalars.epsilon1, grad)
    if factoring.is_factored:
        update, slots = _factored(grad, squares, slots, scalars, factoring)
    else:
        v = scalars.beta2 * slots.v + scalars.complement2 * squares
        update, slots = grad * jax.lax.rsqrt(v), slots._replace(v=v)
    if scalars.clipping is not None:
        excess = _rms(update, factoring) / _like(scalars.clipping, update)
        update = update / jnp.maximum(excess, 1.0)
    update = times(_step_size(param, scalars, scale_by_param, factoring), update)
    if scalars.beta1 is not None:
        update = plus(times(scalars.beta1, slots.m), times(scalars.complement1, update))
        slots = slots._replace(m=update.astype(slots.m.dtype))
    return update, slots


def _factored(
    grad: jax.Array, squares: jax.Array, slots: Slots, scalars: Scalars, factoring: Factoring
) -> tuple[jax.Array, Slots]:
    rows, cols = factoring.rows, factoring.cols
    beta2, complement2 = scalars.beta2, scalars.complement2
    v_row = beta2 * slots.v_row + complement2 * jnp.mean(squares, axis=cols)
    v_col = beta2 * slots.v_col + complement2 * jnp.mean(squares, axis=rows)
    row_mean = jnp.mean(v_row, axis=factoring.rows_of_v_row, keepdims=True)
    row_factor = jnp.expand_dims(jax.lax.rsqrt(v_row / row_mean), cols)
    col_factor = jnp.expand_dims(jax.lax.rsqrt(v_col), rows)
    return grad * row_factor * col_factor, slots._replace(v_row=v_row, v_col=v_col)


def _step_size(
    param: jax.Array, scalars: Scalars, scale_by_param: Any, factoring: Factoring
) -> Any:
    if scale_by_param is False:
        return scalars.learning_rate
    # In the parameter's dtype, as in T5X.
    scale = jnp.maximum(_rms(param, factoring), _like(scalars.epsilon2, param))
    if scalars.max_scale is not None:
        scale = jnp.minimum(scale, _like(scalars.max_scale, param))
    if scale_by_param is not True:
        scale = jnp.where(scale_by_param, scale, jnp.ones_like(scale))
    return times(scalars.learning_rate, scale)


def _rms(array: jax.Array, factoring: Factoring) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array), axis=factoring.averaged, keepdims=True))


def _like(number: Any, array: jax.Array) -> jax.Array:
    return jnp.asarray(number).astype(jax.dtypes.canonicalize_dtype(array.dtype))


def times(a: Any, b: Any) -> Any:
    """Returns `a * b` with standard dtype promotion, even under strict promotion."""
    a, b = _promoted(a, b)
    return a * b


def plus(a: Any, b: Any) -> Any:
    """Returns `a + b` with standard dtype promotion, even under strict promotion."""
    a, b = _promoted(a, b)
    return a + b


def _promoted(a: Any, b: Any) -> tuple[Any, Any]:
    if _is_weak(a):
        return (a, b) if _is_weak(b) else (_like(a, b), b)
    if _is_weak(b):
        return a, _like(b, a)
    # JAX treats NumPy's float64 as float32 unless `jax_enable_x64` is on.
    dtype = _promote_types(*map(jax.dtypes.canonicalize_dtype, (a.dtype, b.dtype)))
    return a.astype(dtype), b.astype(dtype)


@functools.cache
def _promote_types(a: Any, b: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def _is_weak(value: Any) -> bool:
    return type(value) in (bool, int, float) or getattr(value, "weak_type", False)


# The two forms of the result: new parameters, or updates for Optax to add.


def subtract(param: jax.Array, update: jax.Array, decay: Any) -> jax.Array:
    """Returns `(1 - decay) * param - update` in the parameter's dtype; `decay` may be `None`."""
    kept = param if decay is None else times(1.0 - decay, param)
    result: jax.Array = plus(kept, -update).astype(param.dtype)
    return result


def negate(param: jax.Array, update: jax.Array, decay: Any) -> jax.Array:
    """Returns `-(update + decay * param)`, to be added to the parameter."""
    return -update if decay is None else -plus(update, times(decay, param))


def is_finite(*arrays: jax.Array | None) -> jax.Array:
    """Returns a boolean scalar: whether all entries of all arrays are finite."""
    flags = [jnp.all(jnp.isfinite(array)) for array in arrays if array is not None]
    return functools.reduce(jnp.logical_and, flags, jnp.array(True))


def keep_finite(new: Any, old: Any) -> Any:
    """Returns `new` where it is finite, else `old`; `None` stays `None`."""
    return None if new is None else jnp.where(jnp.isfinite(new), new, old)


def select(ok: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` where `ok`, else `old`; `None` stays `None`."""
    return None if new is None else jnp.where(ok, new, old)
