"""The hyper-parameters of Adafactor, and which of them can be overridden in a step."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import HyperParamError

from opt_adafactor._hparam_map import HParamMap

# These determine the structure and shapes of the state, which cannot change between steps.
_FIXED = (
    *("factored", "min_dim_size_to_factor", "factor_map", "logical_factor_rules"),
    "respect_rank2_rules",
)
_NUMBERS = (
    *("learning_rate", "beta1", "decay_rate", "step_offset", "clipping_threshold"),
    *("weight_decay_rate", "epsilon1", "epsilon2", "weight_decay_rate_lr_exponent"),
    *("global_norm_clip_threshold", "max_parameter_scale"),
)
_OPTIONAL = {
    *("learning_rate", "beta1", "clipping_threshold", "weight_decay_rate"),
    *("weight_decay_rate_lr_exponent", "global_norm_clip_threshold", "max_parameter_scale"),
}


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
    for name in _NUMBERS:
        _check_number(name, getattr(hyper_params, name))
    scale = hyper_params.multiply_by_parameter_scale
    if not isinstance(scale, HParamMap) and not _is_flag(scale):
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


def check_static(
    factored: Any, min_dim_size_to_factor: Any, dtype_momentum: Any, respect: Any
) -> None:
    """Raises a `TypeError` for an argument that determines the structure of the state."""
    for name, flag in (("factored", factored), ("respect_rank2_rules", respect)):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"`{name}` must be a bool, found {type(flag).__name__}")
    is_integer = isinstance(min_dim_size_to_factor, int | np.integer)
    if not is_integer or isinstance(min_dim_size_to_factor, bool):
        raise TypeError(
            "`min_dim_size_to_factor` must be a static integer, found "
            f"{type(min_dim_size_to_factor).__name__}"
        )
    if not jnp.issubdtype(dtype_momentum, jnp.floating):
        raise TypeError(f"`dtype_momentum` must be a floating-point dtype, found {dtype_momentum}")


def check_overrides(own: Any, given: Any) -> None:
    """Raises a `HyperParamError` where `given` overrides what `own` hyper-parameters fix."""
    if own is given:
        return
    for name in _FIXED:
        old, new = getattr(own, name), getattr(given, name)
        if old is not new and (isinstance(new, jax.Array) or old != new):
            raise HyperParamError(
                f"`{name}` cannot be overridden for one step, since the shapes of the state depend "
                "on it. Create a new definition and convert the state."
            )
    if (own.beta1 is None) != (given.beta1 is None):
        has, asked = ("no momentum", "on") if own.beta1 is None else ("momentum", "off")
        instead = "with `beta1=0.0`" if own.beta1 is None else "with `beta1=None`"
        advice = "" if own.beta1 is None else ", or override `beta1=0.0`"
        raise HyperParamError(
            f"`beta1`: the definition has {has}, which cannot be turned {asked} for one step, "
            f"since the state depends on it. Create a definition {instead}{advice}."
        )
    check_hyper_params(given)


def _is_flag(value: Any) -> bool:
    if isinstance(value, bool | np.bool_):
        return True
    return isinstance(value, jax.Array) and value.dtype == jnp.bool_ and not value.shape


def _check_number(name: str, value: Any) -> None:
    if value is None and name in _OPTIONAL:
        return
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    is_number = is_array and not jnp.issubdtype(value.dtype, jnp.bool_)
    if not is_number and (isinstance(value, bool) or not isinstance(value, int | float)):
        if name == "learning_rate" and callable(value):
            return
        also = " or None" if name in _OPTIONAL else ""
        raise TypeError(f"`{name}` must be a number{also}, found {_shown(value)}")
    if np.shape(value):
        raise ValueError(f"`{name}` must be a scalar, found an array of shape {np.shape(value)}")


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
