"""One update of Adafactor on a tree: the arithmetic of the definition and of the transformations.

Batch dimensions are never averaged over, so that every layer of a stack is a tensor of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import OptimizerState, check_gradients, increment_step
from opt_core.errors import HyperParamError

from opt_adafactor._factoring import Factoring, make_plan
from opt_adafactor._hyper_params import is_known
from opt_adafactor._rules import HParamMap
from opt_adafactor._state import _AdafactorParamState, flatten_states


class _Step(NamedTuple):
    """The numbers of one step that all tensors share; `None` disables a feature."""

    hyper_params: Any
    learning_rate: Any
    beta2: jax.Array  # float32
    decay: Any
    as_updates: bool


def update_tree(
    hyper_params: Any,
    params: Any,
    state: OptimizerState,
    grads: Any,
    *,
    as_updates: bool = False,
    decay_mask: Any = True,
) -> tuple[Any, OptimizerState]:
    """Returns new parameters, or what Optax adds to them, and the new state."""
    check_gradients(params, grads)
    plan = make_plan(params, hyper_params)
    states = flatten_states(plan, params, state.param_states)
    arrays, gradients = plan.arrays(params), plan.arrays(grads)
    rate = learning_rate_of(hyper_params, state.step)
    since = jnp.asarray(state.step) - jnp.asarray(hyper_params.step_offset).astype(jnp.int32)
    beta2 = decay_rate_pow(since, hyper_params.decay_rate)
    numbers = _Step(hyper_params, rate, beta2, _weight_decay(hyper_params, rate), as_updates)
    update: Callable[..., Any] = functools.partial(_update_tensor, numbers)
    # Each tensor is then a call of one function, which XLA inlines: those with the same shape,
    # factoring and flags are traced once. Untraced tensors are updated operation by operation, as
    # nothing here should be compiled behind the caller's back.
    leaves = jax.tree.leaves((arrays, gradients, states, list(numbers), hyper_params))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        update = jax.jit(update, static_argnums=(0, 1, 2))
    gradients = _clip_global_norm(gradients, hyper_params)
    scaled = hyper_params.multiply_by_parameter_scale
    decays = jax.tree.leaves(jax.tree.broadcast(decay_mask, params))
    results = []
    with jax.numpy_dtype_promotion("standard"):
        for path, factoring, decay, *tensor in zip(
            plan.paths, plan.factorings, decays, arrays, gradients, states, strict=True
        ):
            is_scaled = bool(scaled[path] if isinstance(scaled, HParamMap) else scaled)
            results.append(update(factoring, is_scaled, bool(decay), *tensor))
    new, new_states = (plan.treedef.unflatten([result[i] for result in results]) for i in range(2))
    return new, OptimizerState(increment_step(state.step), new_states)


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


def _weight_decay(hyper_params: Any, learning_rate: Any) -> Any:
    """With an exponent, `rate * learning_rate**exponent`, where a rate of `None` counts as 1."""
    rate, exponent = hyper_params.weight_decay_rate, hyper_params.weight_decay_rate_lr_exponent
    if exponent is None:
        return rate
    if not is_known(learning_rate) or not is_known(exponent):
        learning_rate, exponent = _float32(learning_rate), _float32(exponent)
    power = learning_rate**exponent
    if rate is None:
        return power
    with jax.numpy_dtype_promotion("standard"):
        return rate * power


def _float32(number: Any) -> Any:
    # Cast with NumPy first, as `jnp.asarray` warns when it truncates float64.
    if isinstance(number, np.ndarray | np.generic):
        number = number.astype(np.float32)
    return jnp.asarray(number).astype(jnp.float32)


def _clip_global_norm(grads: Sequence[Any], hyper_params: Any) -> list[Any]:
    """Scales gradients down to a maximum global norm; `None` or 0 disables clipping.

    The norm is computed in float32 and does not overflow for finite gradients. An inf makes every
    finite gradient 0, as in T5X, or with `skip_nan_updates` every gradient NaN, as a NaN does, so
    that the update is skipped.
    """
    threshold = hyper_params.global_norm_clip_threshold
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
    if hyper_params.skip_nan_updates:
        norm = jnp.where(norm < jnp.inf, norm, jnp.nan)
    factor = threshold / norm
    return [
        jnp.where(is_small, grad, part * factor) for grad, part in zip(wide, scaled, strict=True)
    ]


def _update_tensor(
    step: _Step,
    factoring: Factoring,
    is_scaled: bool,
    decays: bool,
    param: jax.Array,
    grad: jax.Array,
    state: _AdafactorParamState,
) -> tuple[jax.Array, _AdafactorParamState]:
    hyper = step.hyper_params
    grad = grad.astype(jnp.float32)
    squares = jnp.square(grad) + _like(hyper.epsilon1, grad)
    if factoring.is_factored:
        update, new = _factored(grad, squares, state, step.beta2, factoring)
    else:
        v = step.beta2 * state.v + (1.0 - step.beta2) * squares
        update, new = grad * jax.lax.rsqrt(v), state.replace(v=v)
    if hyper.clipping_threshold is not None:
        excess = _rms(update, factoring) / _like(hyper.clipping_threshold, update)
        update = update / jnp.maximum(excess, 1.0)
    size = step.learning_rate
    if is_scaled:
        # In the parameter's dtype, as in T5X.
        scale = jnp.maximum(_rms(param, factoring), _like(hyper.epsilon2, param))
        if hyper.max_parameter_scale is not None:
            scale = jnp.minimum(scale, _like(hyper.max_parameter_scale, param))
        size = size * scale
    update = size * update
    if hyper.beta1 is not None:
        update = hyper.beta1 * state.m + (1.0 - hyper.beta1) * update
        new = new.replace(m=update.astype(state.m.dtype))
    decay = step.decay if decays else None
    added = -update if decay is None else -(update + decay * param)
    if step.as_updates and not hyper.skip_nan_updates:
        return added, new
    kept = param if decay is None else (1.0 - decay) * param
    moved = (kept - update).astype(param.dtype)
    if not hyper.skip_nan_updates:
        return moved, new
    # The new parameter can overflow even if the update is finite.
    is_finite = jnp.isfinite(moved)
    out = (
        jnp.where(is_finite, added, 0.0) if step.as_updates else jnp.where(is_finite, moved, param)
    )
    return out, jax.tree.map(_keep_finite, new, state)


def _factored(
    grad: jax.Array,
    squares: jax.Array,
    state: _AdafactorParamState,
    beta2: jax.Array,
    factoring: Factoring,
) -> tuple[jax.Array, _AdafactorParamState]:
    rows, cols = factoring.rows, factoring.cols
    v_row = beta2 * state.v_row + (1.0 - beta2) * jnp.mean(squares, axis=cols)
    v_col = beta2 * state.v_col + (1.0 - beta2) * jnp.mean(squares, axis=rows)
    row_mean = jnp.mean(v_row, axis=factoring.rows_of_v_row, keepdims=True)
    row_factor = jnp.expand_dims(jax.lax.rsqrt(v_row / row_mean), cols)
    col_factor = jnp.expand_dims(jax.lax.rsqrt(v_col), rows)
    return grad * row_factor * col_factor, state.replace(v_row=v_row, v_col=v_col)


def _rms(array: jax.Array, factoring: Factoring) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(array), axis=factoring.averaged, keepdims=True))


def _like(number: Any, array: jax.Array) -> jax.Array:
    return jnp.asarray(number).astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _keep_finite(new: jax.Array, old: jax.Array) -> jax.Array:
    return new if new is old else jnp.where(jnp.isfinite(new), new, old)
