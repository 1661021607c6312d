"""One step of Adafactor on a tree, shared by the definition and the transformation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import HyperParamError

from opt_adafactor import _tensor
from opt_adafactor._factoring import Factoring
from opt_adafactor._hparam_map import HParamMap
from opt_adafactor._hyper_params import is_known
from opt_adafactor._plan import Plan
from opt_adafactor._state import Slots
from opt_adafactor._tensor import Scalars

# `_tensor.subtract` or `_tensor.negate`.
Finish = Callable[[jax.Array, jax.Array, Any], jax.Array]
# Of the scalars and a row: parameter, gradient, statistics, scaling, decay, factoring.
_Update = Callable[..., tuple[jax.Array, Slots]]


def make_scalars(hyper_params: Any, step: Any, learning_rate: Any) -> Scalars:
    """Returns the scalars of one step.

    Args:
      hyper_params: the hyper-parameters, including overrides.
      step: number of updates made before; an integer scalar.
      learning_rate: the learning rate of this step.
    """
    beta1 = hyper_params.beta1
    since = jnp.asarray(step) - jnp.asarray(hyper_params.step_offset).astype(jnp.int32)
    beta2 = _tensor.decay_rate_pow(since, hyper_params.decay_rate)
    return Scalars(
        learning_rate=learning_rate,
        beta2=beta2,
        complement2=1.0 - beta2,
        epsilon1=hyper_params.epsilon1,
        epsilon2=hyper_params.epsilon2,
        max_scale=hyper_params.max_parameter_scale,
        clipping=hyper_params.clipping_threshold,
        beta1=beta1,
        complement1=None if beta1 is None else 1.0 - beta1,
    )


def weight_decay(hyper_params: Any, learning_rate: Any) -> Any:
    """Returns the fraction of the parameters to subtract in one step; `None` for no decay.

    With an exponent, this is `rate * learning_rate**exponent`, where a rate of `None` counts as 1.
    """
    rate, exponent = hyper_params.weight_decay_rate, hyper_params.weight_decay_rate_lr_exponent
    if exponent is None:
        return rate
    power = _power(learning_rate, exponent)
    return power if rate is None else _tensor.times(rate, power)


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


def clip_global_norm(grads: Sequence[Any], threshold: Any, *, spoils: bool) -> list[Any]:
    """Scales gradients down to a maximum global norm; `None` or 0 disables clipping.

    The norm is computed in float32 and does not overflow for finite gradients.

    Args:
      grads: the gradients.
      threshold: the maximum norm.
      spoils: whether an inf makes every gradient NaN, as a NaN does, so that the update is skipped.
        Otherwise it makes every finite gradient 0, as in T5X.
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


def update_tree(
    plan: Plan,
    scalars: Scalars,
    params: Sequence[Any],
    grads: Sequence[Any],
    slots: Sequence[Slots],
    *,
    scale_by_param: Any,
    decays: Sequence[Any],
    skip: bool | str,
    finish: Finish,
) -> tuple[list[jax.Array], list[Slots]]:
    """Applies one update to every tensor of a plan.

    Args:
      plan: the static part of the update.
      scalars: the scalars of this step.
      params: parameters, in the order of the plan, like all other sequences.
      grads: gradients.
      slots: statistics.
      scale_by_param: a flag, or an `HParamMap` of flags.
      decays: weight decay of each parameter, or `None`.
      skip: what to skip if the result is not finite; see `skip_nan_updates` of `Adafactor`.
      finish: computes the result for each parameter.

    Returns:
      The results of `finish`, and the new statistics.
    """
    scales = [_flag(scale_by_param, path) for path in plan.paths]
    rows = list(zip(params, grads, slots, scales, decays, plan.factorings, strict=True))
    if skip == "global":
        return _update_all_or_nothing(rows, scalars, finish)
    mode = skip if isinstance(skip, str) else "entries" if skip else None
    update: _Update = functools.partial(_update_tensor, skip=mode, finish=finish)
    update = _traced_once(update, rows)
    done = [update(scalars, *row) for row in rows]
    return [out for out, _ in done], [new for _, new in done]


def _flag(scale_by_param: Any, path: str) -> Any:
    value = scale_by_param[path] if isinstance(scale_by_param, HParamMap) else scale_by_param
    return bool(value) if is_known(value) else value


def _traced_once(update: _Update, rows: Sequence[tuple[Any, ...]]) -> _Update:
    """Returns the update of a tensor, which a caller traces once for all tensors that are alike.

    Each is then a call of one function, which XLA inlines. Untraced tensors are updated operation
    by operation, as nothing here should be compiled behind the caller's back.
    """
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(rows)):
        return update

    @functools.partial(jax.jit, static_argnums=0)
    def call(constants: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[jax.Array, Slots]:
        values = [
            array if constant is _TRACED else constant[0]
            for constant, array in zip(constants, arrays, strict=True)
        ]
        scalars = Scalars(*values[: len(Scalars._fields)])
        return update(scalars, *values[len(Scalars._fields) :])

    def of_row(scalars: Scalars, *row: Any) -> tuple[jax.Array, Slots]:
        values = (*scalars, *row)
        constants = [_constant(value) for value in values]
        arrays = [
            value if constant is _TRACED else None
            for constant, value in zip(constants, values, strict=True)
        ]
        done: tuple[jax.Array, Slots] = call(tuple(constants), tuple(arrays))
        return done

    return of_row


# A value that a traced function takes as an argument.
_TRACED = object()


def _constant(value: Any) -> Any:
    """Returns a value that is known when tracing, with its type: 1 equals True; or `_TRACED`."""
    known = value is None or is_known(value) or isinstance(value, Factoring)
    return (value, type(value)) if known else _TRACED


def _update_tensor(
    scalars: Scalars,
    param: jax.Array,
    grad: jax.Array,
    slots: Slots,
    scale_by_param: Any,
    decay: Any,
    factoring: Factoring,
    *,
    skip: str | None,
    finish: Finish,
) -> tuple[jax.Array, Slots]:
    update, new = _tensor.scaled_update(param, grad, slots, scalars, scale_by_param, factoring)
    out = finish(param, update, decay)
    if skip is None:
        return out, new
    unchanged = _unchanged(finish, param, out)
    result = _result(finish, param, update, decay, out)
    if skip == "entries":
        kept = Slots(*map(_tensor.keep_finite, new, slots))
        return jnp.where(jnp.isfinite(result), out, unchanged), kept
    return _guarded(_tensor.is_finite(update, result, *new), out, unchanged, new, slots)


def _update_all_or_nothing(
    rows: Sequence[tuple[Any, ...]], scalars: Scalars, finish: Finish
) -> tuple[list[jax.Array], list[Slots]]:
    """Updates all tensors if all results are finite, and none otherwise."""
    scaled = _traced_once(_scaled_tensor, rows)
    made = [scaled(scalars, *row) for row in rows]
    outs = [
        finish(param, update, decay)
        for (param, _, _, _, decay, _), (update, _) in zip(rows, made, strict=True)
    ]
    flags = [
        _tensor.is_finite(update, _result(finish, param, update, decay, out), *new)
        for (param, _, _, _, decay, _), (update, new), out in zip(rows, made, outs, strict=True)
    ]
    ok = functools.reduce(jnp.logical_and, flags, jnp.array(True))
    done = [
        _guarded(ok, out, _unchanged(finish, param, out), new, old)
        for (param, _, old, _, _, _), (_, new), out in zip(rows, made, outs, strict=True)
    ]
    return [out for out, _ in done], [new for _, new in done]


def _scaled_tensor(
    scalars: Scalars,
    param: jax.Array,
    grad: jax.Array,
    slots: Slots,
    scale_by_param: Any,
    _: Any,
    factoring: Factoring,
) -> tuple[jax.Array, Slots]:
    return _tensor.scaled_update(param, grad, slots, scalars, scale_by_param, factoring)


def _guarded(
    ok: jax.Array, out: jax.Array, unchanged: jax.Array, new: Slots, old: Slots
) -> tuple[jax.Array, Slots]:
    kept = Slots(*(_tensor.select(ok, a, b) for a, b in zip(new, old, strict=True)))
    return jnp.where(ok, out, unchanged), kept


def _result(
    finish: Finish, param: jax.Array, update: jax.Array, decay: Any, out: jax.Array
) -> jax.Array:
    """Returns the new parameter, which can overflow even if the update is finite."""
    return out if finish is _tensor.subtract else _tensor.subtract(param, update, decay)


def _unchanged(finish: Finish, param: jax.Array, out: jax.Array) -> jax.Array:
    return param if finish is _tensor.subtract else jnp.zeros_like(out)
