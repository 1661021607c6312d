"""One update of Adafactor on a tree: the arithmetic of the definition and of the transformations.

Notation follows Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost"
(2018, https://arxiv.org/abs/1804.04235), generalized as in T5X: rows and columns may be several
dimensions each, and batch dimensions are never averaged over, so that every layer of a stack is
treated as a separate tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import HyperParamError

from opt_adafactor._factoring import Factoring
from opt_adafactor._hparam_map import HParamMap
from opt_adafactor._hyper_params import is_known
from opt_adafactor._plan import Plan
from opt_adafactor._state import _AdafactorParamState, check_states


class _Scalars(NamedTuple):
    """The scalars of one step, shared by all tensors; `None` disables a feature.

    Python numbers and weakly typed arrays take the dtype of the array they are multiplied with.
    """

    learning_rate: Any
    beta2: Any  # float32
    complement2: Any
    epsilon1: Any
    epsilon2: Any
    max_scale: Any
    clipping: Any
    beta1: Any
    complement1: Any
    decay: Any


class _Tensor(NamedTuple):
    """What is static about one tensor: tensors that are alike in it are traced once."""

    factoring: Factoring
    is_scaled: bool | None  # by the parameter; `None` where that is traced
    decays: bool


def update_tree(
    plan: Plan,
    hyper_params: Any,
    step: Any,
    params: Sequence[Any],
    grads: Sequence[Any],
    states: Sequence[_AdafactorParamState],
    *,
    as_updates: bool = False,
    decays: Sequence[bool] | None = None,
) -> tuple[list[jax.Array], list[_AdafactorParamState]]:
    """Returns new parameters, or what Optax adds to them, and new statistics, in plan order."""
    check_states(plan, params, states, has_momentum=hyper_params.beta1 is not None)
    scalars = _make_scalars(hyper_params, step)
    skips = bool(hyper_params.skip_nan_updates)
    grads = _clip_global_norm(grads, hyper_params.global_norm_clip_threshold, spoils=skips)
    flags = [_flag(hyper_params.multiply_by_parameter_scale, path) for path in plan.paths]
    constants = {k: v for k, v in scalars._asdict().items() if v is None or is_known(v)}
    traced = {k: v for k, v in scalars._asdict().items() if k not in constants}

    def update(
        tensor: _Tensor, traced: dict[str, Any], param: Any, grad: Any, state: Any, flag: Any
    ) -> tuple[jax.Array, _AdafactorParamState]:
        scalars = _Scalars(**constants, **traced)
        return _update_tensor(tensor, scalars, param, grad, state, flag, skips, as_updates)

    # Each tensor is then a call of one function, which XLA inlines. Untraced tensors are updated
    # operation by operation, as nothing here should be compiled behind the caller's back.
    leaves = jax.tree.leaves((params, grads, states, traced, flags))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        update = jax.jit(update, static_argnums=0)
    decays = [True] * len(params) if decays is None else decays
    results, new_states = [], []
    with jax.numpy_dtype_promotion("standard"):
        for factoring, param, grad, state, flag, decay in zip(
            plan.factorings, params, grads, states, flags, decays, strict=True
        ):
            is_static = isinstance(flag, bool)
            tensor = _Tensor(factoring, flag if is_static else None, decay)
            result, new_state = update(
                tensor, traced, param, grad, state, None if is_static else flag
            )
            results.append(result)
            new_states.append(new_state)
    return results, new_states


def learning_rate_of(hyper_params: Any, step: Any) -> Any:
    """Returns the learning rate of a step, or raises a `HyperParamError` where there is none."""
    rate = hyper_params.learning_rate
    if rate is None:
        raise HyperParamError(
            "no `learning_rate`: pass one to the definition, or to every step as "
            "`apply_gradient(grads, learning_rate=...)`"
        )
    return rate(step) if callable(rate) else rate


def decay_rate_pow(step: Any, exponent: Any = 0.8) -> jax.Array:
    """Returns `1 - (step + 1)**-exponent`, the decay of the second moments; 0 before step 0."""
    # Cast before the addition: a step of 2^31 - 1 would overflow in int32.
    number = jnp.maximum(jnp.asarray(step).astype(jnp.float32), 0.0) + 1.0
    return 1.0 - number ** -jnp.asarray(exponent).astype(jnp.float32)


def _make_scalars(hyper_params: Any, step: Any) -> _Scalars:
    rate, beta1 = learning_rate_of(hyper_params, step), hyper_params.beta1
    since = jnp.asarray(step) - jnp.asarray(hyper_params.step_offset).astype(jnp.int32)
    beta2 = decay_rate_pow(since, hyper_params.decay_rate)
    return _Scalars(
        learning_rate=rate,
        beta2=beta2,
        complement2=1.0 - beta2,
        epsilon1=hyper_params.epsilon1,
        epsilon2=hyper_params.epsilon2,
        max_scale=hyper_params.max_parameter_scale,
        clipping=hyper_params.clipping_threshold,
        beta1=beta1,
        complement1=None if beta1 is None else 1.0 - beta1,
        decay=_weight_decay(hyper_params, rate),
    )


def _weight_decay(hyper_params: Any, learning_rate: Any) -> Any:
    """With an exponent, `rate * learning_rate**exponent`, where a rate of `None` counts as 1."""
    rate, exponent = hyper_params.weight_decay_rate, hyper_params.weight_decay_rate_lr_exponent
    if exponent is None:
        return rate
    power = _power(learning_rate, exponent)
    if rate is None:
        return power
    with jax.numpy_dtype_promotion("standard"):
        return rate * power


def _power(base: Any, exponent: Any) -> Any:
    if not is_known(base) or not is_known(exponent):
        return _float32(base) ** _float32(exponent)
    try:
        power = float(base) ** float(exponent)
    except ZeroDivisionError:
        power = math.inf
    if isinstance(power, complex) or not math.isfinite(power):
        raise HyperParamError(
            f"`weight_decay_rate_lr_exponent`: `learning_rate` {base} to the power of {exponent} "
            "is not finite. Use a non-negative exponent, or a positive learning rate."
        )
    return power


def _float32(number: Any) -> Any:
    # Cast with NumPy first, as `jnp.asarray` warns when it truncates float64.
    if isinstance(number, np.ndarray | np.generic):
        number = number.astype(np.float32)
    return jnp.asarray(number).astype(jnp.float32)


def _clip_global_norm(grads: Sequence[Any], threshold: Any, *, spoils: bool) -> list[Any]:
    """Scales gradients down to a maximum global norm; `None` or 0 disables clipping.

    The norm is computed in float32 and does not overflow for finite gradients. An inf makes every
    finite gradient 0, as in T5X, or where it `spoils` every gradient NaN, as a NaN does, so that
    the update is skipped.
    """
    if threshold is None or (is_known(threshold) and threshold == 0):
        return list(grads)
    wide = [jnp.asarray(grad).astype(jnp.float32) for grad in grads]
    sizes = [jnp.max(jnp.abs(grad), initial=0.0) for grad in wide]
    largest = functools.reduce(jnp.maximum, sizes, jnp.float32(0))
    unit = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)
    scaled = [grad / unit for grad in wide]
    squares = [jnp.sum(jnp.square(grad)) for grad in scaled]
    norm = jnp.sqrt(functools.reduce(jnp.add, squares, jnp.float32(0)))  # in units
    threshold = _float32(threshold)
    is_small = (threshold == 0) | (norm * unit <= threshold)
    if spoils:
        norm = jnp.where(norm < jnp.inf, norm, jnp.nan)
    factor = threshold / norm
    return [
        jnp.where(is_small, grad, part * factor) for grad, part in zip(wide, scaled, strict=True)
    ]


def _flag(scale_by_param: Any, path: str) -> Any:
    value = scale_by_param[path] if isinstance(scale_by_param, HParamMap) else scale_by_param
    return bool(value) if is_known(value) else value


def _update_tensor(
    tensor: _Tensor,
    scalars: _Scalars,
    param: jax.Array,
    grad: jax.Array,
    state: _AdafactorParamState,
    flag: Any,
    skips: bool,
    as_updates: bool,
) -> tuple[jax.Array, _AdafactorParamState]:
    grad = grad.astype(jnp.float32)
    squares = jnp.square(grad) + _like(scalars.epsilon1, grad)
    if tensor.factoring.is_factored:
        update, new = _factored(grad, squares, state, scalars, tensor.factoring)
    else:
        v = scalars.beta2 * state.v + scalars.complement2 * squares
        update, new = grad * jax.lax.rsqrt(v), state.replace(v=v)
    if scalars.clipping is not None:
        excess = _rms(update, tensor.factoring) / _like(scalars.clipping, update)
        update = update / jnp.maximum(excess, 1.0)
    update = _step_size(param, scalars, flag, tensor) * update
    if scalars.beta1 is not None:
        update = scalars.beta1 * state.m + scalars.complement1 * update
        new = new.replace(m=update.astype(state.m.dtype))
    decay = scalars.decay if tensor.decays else None
    added = -update if decay is None else -(update + decay * param)
    if as_updates and not skips:
        return added, new
    kept = param if decay is None else (1.0 - decay) * param
    moved = (kept - update).astype(param.dtype)
    if not skips:
        return moved, new
    # The new parameter can overflow even if the update is finite.
    is_finite = jnp.isfinite(moved)
    out = jnp.where(is_finite, added, 0.0) if as_updates else jnp.where(is_finite, moved, param)
    return out, jax.tree.map(_keep_finite, new, state)


def _factored(
    grad: jax.Array,
    squares: jax.Array,
    state: _AdafactorParamState,
    scalars: _Scalars,
    factoring: Factoring,
) -> tuple[jax.Array, _AdafactorParamState]:
    rows, cols = factoring.rows, factoring.cols
    beta2, complement2 = scalars.beta2, scalars.complement2
    v_row = beta2 * state.v_row + complement2 * jnp.mean(squares, axis=cols)
    v_col = beta2 * state.v_col + complement2 * jnp.mean(squares, axis=rows)
    row_mean = jnp.mean(v_row, axis=factoring.rows_of_v_row, keepdims=True)
    row_factor = jnp.expand_dims(jax.lax.rsqrt(v_row / row_mean), cols)
    col_factor = jnp.expand_dims(jax.lax.rsqrt(v_col), rows)
    return grad * row_factor * col_factor, state.replace(v_row=v_row, v_col=v_col)


def _step_size(param: jax.Array, scalars: _Scalars, flag: Any, tensor: _Tensor) -> Any:
    if tensor.is_scaled is False:
        return scalars.learning_rate
    # In the parameter's dtype, as in T5X.
    scale = jnp.maximum(_rms(param, tensor.factoring), _like(scalars.epsilon2, param))
    if scalars.max_scale is not None:
        scale = jnp.minimum(scale, _like(scalars.max_scale, param))
    if tensor.is_scaled is None:
        scale = jnp.where(flag, scale, jnp.ones_like(scale))
    return scalars.learning_rate * scale


def _rms(array: jax.Array, factoring: Factoring) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array), axis=factoring.averaged, keepdims=True))


def _like(number: Any, array: jax.Array) -> jax.Array:
    return jnp.asarray(number).astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _keep_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    return new if new is old else jnp.where(jnp.isfinite(new), new, old)
