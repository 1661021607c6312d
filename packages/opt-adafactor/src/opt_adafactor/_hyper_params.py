"""The hyper-parameters of Adafactor, and which of them can be overridden in a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import HyperParamError

from opt_adafactor._rules import HParamMap

# These determine the structure and shapes of the state, which cannot change between steps.
_FIXED = (
    *("factored", "min_dim_size_to_factor", "factor_map", "logical_factor_rules"),
    "respect_rank2_rules",
)
_FLAGS = ("multiply_by_parameter_scale", "skip_nan_updates")


class _AdafactorHyperParams(flax.struct.PyTreeNode):
    """The hyper-parameters, in T5X's order; documented in `Adafactor`."""

    learning_rate: Any = None
    factored: Any = True
    multiply_by_parameter_scale: Any = True
    beta1: Any = None
    decay_rate: Any = 0.8
    step_offset: Any = 0
    clipping_threshold: Any = 1.0
    weight_decay_rate: Any = None
    min_dim_size_to_factor: Any = 128
    epsilon1: Any = 1e-30
    epsilon2: Any = 1e-3
    factor_map: Any = None
    logical_factor_rules: Any = None
    weight_decay_rate_lr_exponent: Any = None
    global_norm_clip_threshold: Any = None
    max_parameter_scale: Any = None
    skip_nan_updates: Any = False
    respect_rank2_rules: Any = False


def is_known(value: Any) -> bool:
    """Whether a number is concrete at trace time, so that Python can branch on it."""
    return isinstance(value, bool | int | float | np.generic)


def check_hyper_params(hyper_params: Any) -> None:
    """Raises a `TypeError` or `ValueError` unless all hyper-parameters are in their ranges."""
    for field in dataclasses.fields(hyper_params):
        if field.name not in (*_FIXED, *_FLAGS):
            is_optional = field.default is None or field.name == "clipping_threshold"
            _check_number(field.name, getattr(hyper_params, field.name), is_optional=is_optional)
    min_dim = hyper_params.min_dim_size_to_factor
    if not isinstance(min_dim, int | np.integer):
        raise TypeError(
            f"`min_dim_size_to_factor` must be a static integer, found {type(min_dim).__name__}"
        )
    scale = hyper_params.multiply_by_parameter_scale
    if not isinstance(scale, HParamMap | bool | np.bool_):
        raise TypeError(
            "`multiply_by_parameter_scale` must be a bool or an `HParamMap`, found "
            f"{type(scale).__name__}"
        )
    if not isinstance(hyper_params.skip_nan_updates, bool):
        raise ValueError(
            "`skip_nan_updates` must be False, or True to skip entries as T5X does, found "
            f"{_shown(hyper_params.skip_nan_updates)}. To skip steps, use `opt_accumulate.guard`."
        )
    threshold = hyper_params.clipping_threshold
    if is_known(threshold) and not threshold > 0:
        raise ValueError(
            f"`clipping_threshold` must be positive, found {threshold}; use `None` to disable "
            "clipping"
        )
    rate, exponent = hyper_params.weight_decay_rate, hyper_params.weight_decay_rate_lr_exponent
    if rate is None and is_known(exponent) and exponent == 0:
        raise ValueError(
            "`weight_decay_rate_lr_exponent` 0 without a `weight_decay_rate` is a weight decay of "
            "1, which discards the parameters. Pass `weight_decay_rate` alone."
        )


def check_overrides(own: Any, overridden: Any) -> None:
    """Raises a `HyperParamError` where `overridden` overrides what `own` hyper-parameters fix."""
    if own is overridden:
        return
    for name in _FIXED:
        old, new = getattr(own, name), getattr(overridden, name)
        if old is not new and (isinstance(new, jax.Array) or old != new):
            raise HyperParamError(
                f"`{name}` cannot be overridden for one step, since the shapes of the state depend "
                "on it. Create a new definition and convert the state."
            )
    if (own.beta1 is None) != (overridden.beta1 is None):
        has, turned, instead = (
            ("no momentum", "on", "`beta1=0.0`")
            if own.beta1 is None
            else ("momentum", "off", "`beta1=None`, or override `beta1=0.0`")
        )
        raise HyperParamError(
            f"`beta1`: the definition has {has}, which cannot be turned {turned} for one step, "
            f"since the state depends on it. Create a definition with {instead}."
        )
    check_hyper_params(overridden)


def _check_number(name: str, value: Any, *, is_optional: bool) -> None:
    if (value is None and is_optional) or (name == "learning_rate" and callable(value)):
        return
    is_number = isinstance(value, int | float | np.generic | np.ndarray | jax.Array)
    if not is_number or jnp.result_type(value) == jnp.bool_:
        also = " or None" if is_optional else ""
        raise TypeError(f"`{name}` must be a number{also}, found {_shown(value)}")
    if np.shape(value):
        raise ValueError(f"`{name}` must be a scalar, found an array of shape {np.shape(value)}")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
