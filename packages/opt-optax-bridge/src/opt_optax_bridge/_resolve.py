"""Questions about the next update of a definition: what it uses, and what may be changed in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import OptimizerState
from opt_core.errors import OptimizerError

from opt_optax_bridge._overrides import Update, changed_fields, field_values

if TYPE_CHECKING:
    from opt_optax_bridge._wrapper import OptaxWrapper

T = TypeVar("T")


def resolve(
    definition: OptaxWrapper,
    hyper_params: Any,
    params: Any,
    state: OptimizerState,
    extra_args: Mapping[str, Any],
) -> Any:
    """Returns hyper-parameters with schedules as numbers; see `resolve_hyper_params`."""
    changed = changed_fields(definition.hyper_params, hyper_params)
    values, resolved = field_values(hyper_params), {}
    schedules = {name: value for name, value in values.items() if callable(value)}
    if schedules or changed or extra_args:
        resolved = ask(
            lambda update: update.schedule_values(changed, schedules),
            definition,
            params,
            state,
            extra_args,
        )
    numbers = {k: jnp.asarray(v, _float_dtype(v)) for k, v in values.items() if k not in schedules}
    return dataclasses.replace(hyper_params, **numbers, **resolved)


def ask(
    question: Callable[[Update], T],
    definition: OptaxWrapper,
    params: Any,
    state: OptimizerState,
    extra_args: Mapping[str, Any],
) -> T:
    """Asks about an update with gradients of zero: no answer depends on them."""
    grads = jax.tree.map(jnp.zeros_like, params)
    update = Update(definition, grads, state.param_states, params, extra_args)
    try:
        return question(update)
    except OptimizerError:
        raise
    except Exception:
        examples = jax.tree.map(lambda g: g[None], grads)
        if not definition.takes_per_example_grads(params, state, examples):
            raise
        return question(dataclasses.replace(update, grads=examples))


def _float_dtype(value: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(getattr(value, "dtype", np.dtype(float)))
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)
