"""What a step uses, and what may be changed in it: answers for logs and for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import MultiOptimizer, Optimizer
from opt_core.errors import OptimizerError

from opt_optax_bridge._overrides import Update, changed_fields, field_values
from opt_optax_bridge._wrapper import OptaxWrapper

T = TypeVar("T")


def resolve_hyper_params(optimizer: Optimizer, **overrides: Any) -> Any:
    """Returns the hyper-parameters that `optimizer.apply_gradient` would use now.

    Schedules are evaluated where the update evaluates them: at the count in the state. Traceable,
    so that a training step can log what it applies.

    Args:
      optimizer: an optimizer whose definition is an `OptaxWrapper`.
      **overrides: what `apply_gradient` gets besides the gradients, extra arguments included.

    Returns:
      A dataclass like `optimizer_def.hyper_params`, every field a float scalar; `None` for a
      schedule that an update does not evaluate.

    Raises:
      HyperParamError: `apply_gradient` would refuse the same overrides.

    Examples:
      >>> import opt_optax_bridge, optax
      >>> schedule = optax.linear_schedule(0.0, 1.0, transition_steps=10)
      >>> optimizer = opt_optax_bridge.sgd(schedule).create({'w': jnp.ones(2)})
      >>> optimizer = optimizer.apply_gradient({'w': jnp.ones(2)})
      >>> print(resolve_hyper_params(optimizer).learning_rate)
      0.1
      >>> print(resolve_hyper_params(optimizer, learning_rate=0.5).learning_rate)
      0.5
    """
    definition = _definition(optimizer)
    names = definition.extra_arg_names(overrides)
    extra_args = {name: overrides.pop(name) for name in names}
    hyper_params = definition.acting_hyper_params(**overrides)
    changed = changed_fields(definition.acting_hyper_params(), hyper_params)
    values, resolved = field_values(hyper_params), {}
    schedules = {name: value for name, value in values.items() if callable(value)}
    if schedules or changed or extra_args:
        resolved = _ask(lambda u: u.schedule_values(changed, schedules), optimizer, extra_args)
    numbers = {k: jnp.asarray(v, _float_dtype(v)) for k, v in values.items() if k not in schedules}
    return dataclasses.replace(hyper_params, **numbers, **resolved)


def overridable_hyper_params(optimizer: Optimizer, **extra_args: Any) -> tuple[str, ...]:
    """Returns the names that `optimizer.apply_gradient` accepts as overrides.

    Every float-valued argument of the constructor is tried with a traced value: the update must
    build, keep the structure of the state, and depend on it.

    Args:
      optimizer: an optimizer whose definition is an `OptaxWrapper`.
      **extra_args: what the transformation's update needs besides gradients, such as `value`.

    Examples:
      >>> import opt_optax_bridge
      >>> optimizer = opt_optax_bridge.adagrad(0.1).create({'w': jnp.ones(2)})
      >>> overridable_hyper_params(optimizer)  # the initial accumulator acts at the start only
      ('learning_rate', 'eps')
    """
    definition = _definition(optimizer)
    if definition.hyper_params is not definition.acting_hyper_params():
        return ()  # the face of T5X ignores overrides
    return _ask(Update.overridable, optimizer, extra_args)


def _ask(question: Callable[[Update], T], optimizer: Optimizer, extra_args: Mapping[str, Any]) -> T:
    """Asks about an update with gradients of zero: no answer depends on them."""
    definition, params = _definition(optimizer), optimizer.target
    grads = jax.tree.map(jnp.zeros_like, params)
    update = Update(definition, grads, optimizer.state.param_states, params, extra_args)
    try:
        return question(update)
    except OptimizerError:
        raise
    except Exception:
        examples = jax.tree.map(lambda g: g[None], grads)
        if not definition.takes_per_example_grads(params, optimizer.state, examples):
            raise
        return question(dataclasses.replace(update, grads=examples))


def _definition(optimizer: Optimizer) -> OptaxWrapper:
    definition = optimizer.optimizer_def
    if isinstance(definition, OptaxWrapper):
        return definition
    hint = ""
    if isinstance(definition, MultiOptimizer):
        hint = ". Ask about one of its groups: `definition.split(optimizer)[name]`"
    raise TypeError(
        "`optimizer` must be one of an `OptaxWrapper`; its definition is a "
        f"{type(definition).__name__}{hint}"
    )


def _float_dtype(value: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(getattr(value, "dtype", np.dtype(float)))
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)
