"""The hyper-parameters that a step uses, and those that can be overridden."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.typing import ArrayLike
from opt_core import MultiOptimizer, Optimizer, OptimizerDef
from opt_core.errors import HyperParamError

from opt_optax_bridge._overrides import Update, ask
from opt_optax_bridge._recipe import field_values
from opt_optax_bridge._wrapper import OptaxWrapper


def resolve_hyper_params(optimizer: Optimizer, *, missing: Any = "error", **overrides: Any) -> Any:
    """Returns the hyper-parameters that `optimizer.apply_gradient` would use now.

    Schedules are evaluated where the update evaluates them: at the count in the state. Traceable,
    so that a training step can log what it applies.

    Args:
      optimizer: an optimizer whose definition is an `OptaxWrapper`, or a `MultiOptimizer`.
      missing: see `Optimizer.apply_gradient`.
      **overrides: the other arguments of `apply_gradient`, extra arguments included.

    Returns:
      A dataclass like `optimizer_def.hyper_params`, every field a float scalar; `None` for a
      schedule that an update does not evaluate. For a `MultiOptimizer`, a dict of them by group;
      for a definition in it that does not wrap Optax, the dataclass that it uses.

    Raises:
      HyperParamError: `apply_gradient` would refuse the same overrides.

    Examples:
      >>> import jax.numpy as jnp, opt_optax_bridge, optax
      >>> schedule = optax.linear_schedule(0.0, 1.0, transition_steps=10)
      >>> optimizer = opt_optax_bridge.sgd(schedule).create({'w': jnp.ones(2)})
      >>> optimizer = optimizer.apply_gradient({'w': jnp.ones(2)})
      >>> print(resolve_hyper_params(optimizer).learning_rate)
      0.1
      >>> print(resolve_hyper_params(optimizer, learning_rate=0.5).learning_rate)
      0.5
    """
    definition = optimizer.optimizer_def
    names = definition.extra_arg_names(overrides)
    extra_args = {name: overrides.pop(name) for name in names}
    if missing != "error":
        overrides["missing"] = missing
    hyper_params = definition.update_hyper_params(**overrides)
    return definition.resolve_hyper_params(
        hyper_params, optimizer.target, optimizer.state, **extra_args
    )


def scale_learning_rate(
    optimizer: Optimizer,
    factor: ArrayLike | Mapping[str, ArrayLike],
    *,
    name: str = "learning_rate",
    **extra_args: Any,
) -> dict[str, Any]:
    """Returns overrides that multiply the learning rate of the next update by a factor.

    A schedule itself does not change; its value at this step is scaled.

    Args:
      optimizer: see `resolve_hyper_params`; groups without a learning rate keep what they have.
      factor: a number or a scalar array; or a mapping from names of groups to factors.
      name: the hyper-parameter to scale.
      **extra_args: extra arguments of the update, such as `value`.

    Raises:
      HyperParamError: no group has the hyper-parameter, or it has no value.

    Examples:
      >>> import jax.numpy as jnp
      >>> import opt_optax_bridge as opt
      >>> optimizer = opt.sgd(0.5).create({'w': jnp.ones(1)})
      >>> half = scale_learning_rate(optimizer, 0.5)
      >>> optimizer.apply_gradient({'w': jnp.ones(1)}, **half).target['w'].tolist()
      [0.75]
    """
    scaled = _scaled(resolve_hyper_params(optimizer, **extra_args), factor, name)
    if not scaled or _ignores_overrides(optimizer.optimizer_def):
        raise HyperParamError(f"there is no `{name}` to scale")
    return scaled


def _scaled(used: Any, factor: Any, name: str) -> dict[str, Any]:
    if isinstance(used, dict):
        factors = factor if isinstance(factor, Mapping) else dict.fromkeys(used, factor)
        if unknown := factors.keys() - used.keys():
            raise HyperParamError(
                f"`factor` names {sorted(unknown)}; the groups that are updated are {list(used)}"
            )
        scaled = {group: _scaled(used[group], factors[group], name) for group in factors}
        by_group = {group: overrides for group, overrides in scaled.items() if overrides}
        return {"group_overrides": by_group} if by_group else {}
    values = {
        field: value
        for field, value in (field_values(used) if dataclasses.is_dataclass(used) else {}).items()
        if field.rpartition(".")[2] == name  # addressed by the part of a chain
    }
    if absent := [field for field, value in values.items() if value is None]:
        raise HyperParamError(f"`{absent[0]}` has no value at this step, and cannot be scaled")
    return {field: factor * value for field, value in values.items()}


def overridable_hyper_params(optimizer: Optimizer, **extra_args: Any) -> tuple[str, ...]:
    """Returns the names that `optimizer.apply_gradient` accepts as overrides.

    Tries every float-valued argument of the constructor with a traced value: building the update
    must succeed, the structure of the state must not change, and the result must depend on it.

    Args:
      optimizer: an optimizer whose definition is an `OptaxWrapper`.
      **extra_args: extra arguments of the transformation's update, such as `value`.

    Examples:
      >>> import jax.numpy as jnp, opt_optax_bridge
      >>> optimizer = opt_optax_bridge.adagrad(0.1).create({'w': jnp.ones(2)})
      >>> overridable_hyper_params(optimizer)  # the initial accumulator acts at the start only
      ('learning_rate', 'eps')
    """
    definition = _wrapper_of(optimizer)
    if _ignores_overrides(definition):
        return ()
    return ask(Update.overridable, definition, optimizer.target, optimizer.state, extra_args)


def _ignores_overrides(definition: OptimizerDef) -> bool:
    """Whether it is one of T5X's facade, alone and not in a group."""
    if not isinstance(definition, OptaxWrapper):
        return False
    return definition.hyper_params is not definition.built_with


def _wrapper_of(optimizer: Optimizer) -> OptaxWrapper:
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
