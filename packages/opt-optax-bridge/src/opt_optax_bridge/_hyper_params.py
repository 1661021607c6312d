"""What a step uses, and what may be changed in it: answers for logs and for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import Optimizer

from opt_optax_bridge._overrides import (
    changed_fields,
    evaluate,
    needed_variables,
    overridable,
    traced_update,
)
from opt_optax_bridge._wrapper import OptaxWrapper


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
    hyper_params = definition.update_hyper_params(**overrides)
    changed = changed_fields(definition.hyper_params, hyper_params)
    operands = (
        jax.tree.map(jnp.zeros_like, optimizer.target),
        optimizer.state.param_states,
        optimizer.target,
    )
    if changed or extra_args:  # refuse what `apply_gradient` refuses
        jax.eval_shape(lambda *o: traced_update(definition, changed, extra_args, *o), *operands)
    values = {f.name: getattr(hyper_params, f.name) for f in dataclasses.fields(hyper_params)}
    schedules = {name: value for name, value in values.items() if callable(value)}
    evaluated = _evaluate_schedules(definition, schedules, extra_args, operands)
    numbers = {k: jnp.asarray(v, _float_dtype(v)) for k, v in values.items() if k not in schedules}
    return dataclasses.replace(hyper_params, **numbers, **evaluated)


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
    grads = jax.tree.map(jnp.zeros_like, optimizer.target)
    state, params = optimizer.state.param_states, optimizer.target
    return overridable(_definition(optimizer), extra_args, grads, state, params)


def _definition(optimizer: Optimizer) -> OptaxWrapper:
    if not isinstance(optimizer.optimizer_def, OptaxWrapper):
        raise TypeError(
            "`optimizer` must be one of an `OptaxWrapper`; its definition is a "
            f"{type(optimizer.optimizer_def).__name__}"
        )
    return optimizer.optimizer_def


def _float_dtype(value: Any) -> Any:
    dtype = getattr(value, "dtype", np.dtype(int))
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)


def _evaluate_schedules(
    definition: OptaxWrapper,
    schedules: Mapping[str, Any],
    extra_args: Mapping[str, Any],
    operands: tuple[Any, Any, Any],
) -> dict[str, Any]:
    """Traces an update with schedules that note their values, and evaluates just those."""
    if not schedules:
        return {}

    def rates(grads: Any, state: Any, params: Any) -> dict[str, Any]:
        noted: dict[str, Any] = {}

        def noting(name: str, schedule: Any) -> Any:
            def evaluate_and_note(count: Any) -> Any:
                return noted.setdefault(name, schedule(count))

            return evaluate_and_note

        tx = definition.build({name: noting(name, s) for name, s in schedules.items()})
        tx.update(grads, state, params, **extra_args)
        return {name: jnp.asarray(noted[name]) if name in noted else None for name in schedules}

    program, out = jax.make_jaxpr(rates, return_shape=True)(*operands)
    needed = needed_variables(program, program.jaxpr.outvars)
    kept = [eqn for eqn in program.jaxpr.eqns if any(v in needed for v in eqn.outvars)]
    program = program.replace(jaxpr=program.jaxpr.replace(eqns=kept))
    leaves = evaluate(program, jax.tree.leaves(operands))
    return dict(jax.tree.unflatten(jax.tree.structure(out), leaves))
