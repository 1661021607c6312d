"""Definitions as Optax transformations, for APIs that accept nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
from opt_core import MultiOptimizer, Optimizer, OptimizerDef, OptimizerState
from opt_core.errors import UnusedArgumentError
from opt_core.protocols import Transformation

from opt_optax_bridge._wrapper import OptaxWrapper


def as_transformation(definition: OptimizerDef) -> optax.GradientTransformationExtraArgs:
    """Returns a definition as an Optax transformation.

    For APIs that accept nothing else: `optax.chain`, `TrainState.create(tx=...)`, `nnx.Optimizer`,
    loops with `tx.update`. Hyper-parameters and extra arguments are keywords of its `update`
    (`learning_rate=`, `group_overrides=`). A keyword that the definition does not know is ignored,
    as in Optax, where a chain passes every keyword to all of its parts.

    The state is Optax's own for a wrapped optimizer, an `OptimizerState` for any other definition.
    A definition that returns parameters and not updates (`opt_adafactor.Adafactor`) is subtracted
    from them: adding its updates again is exact but for round-off.

    Args:
      definition: any `OptimizerDef`: groups, Adafactor, a wrapped optimizer.

    Raises:
      TypeError: `definition` is not an `OptimizerDef`.

    Examples:
      >>> import opt_optax_bridge as opt
      >>> groups = MultiOptimizer(('w', opt.sgd(0.5)), ('b', opt.adam(0.1)), names=['w', 'b'])
      >>> tx = optax.chain(optax.clip(1.0), as_transformation(groups))
      >>> params = {'w': jnp.ones(1), 'b': jnp.ones(1)}
      >>> updates, state = tx.update({'w': jnp.ones(1), 'b': jnp.ones(1)}, tx.init(params), params)
      >>> updates['w'].tolist()
      [-0.5]
    """
    given: Any = definition
    if isinstance(given, Optimizer):
        raise TypeError(
            "`as_transformation` takes a definition; got an Optimizer. Write "
            "`as_transformation(optimizer.optimizer_def)`."
        )
    if not isinstance(given, OptimizerDef):
        is_one = isinstance(given, Transformation)
        hint = "It already is a transformation." if is_one else "Call its constructor first."
        raise TypeError(
            f"`as_transformation` takes a definition; got a {type(given).__name__}. {hint}"
        )
    is_wrapper = isinstance(definition, OptaxWrapper)

    def init(params: Any) -> Any:
        try:
            state = definition.init_state(params)
        except TypeError:
            definition.create(params)  # names the leaves that are not arrays, if that is the cause
            raise
        return state.param_states if is_wrapper else state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None and not is_wrapper:
            raise ValueError(
                f"`params`: a {type(definition).__name__} needs them; call "
                "`tx.update(grads, state, params)`"
            )
        whole = OptimizerState(jnp.zeros((), jnp.int32), state) if is_wrapper else state
        updates, new = _update(definition, params, whole, updates, extra_args)
        return updates, new.param_states if is_wrapper else new

    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    definition: OptimizerDef,
    params: Any,
    state: OptimizerState,
    grads: Any,
    given: Mapping[str, Any],
) -> tuple[Any, OptimizerState]:
    """Computes updates with the keywords that the definition knows."""
    whole = {"hyper_params"}
    overrides: dict[str, Any] = {}
    if isinstance(definition, MultiOptimizer):
        whole.add("group_overrides")
        overrides["missing"] = "ignore"
    overrides |= {k: v for k, v in given.items() if k in whole or definition.has_hyper_param(k)}
    names = definition.extra_arg_names(given.keys() - overrides.keys())
    taken = {name: given[name] for name in names}
    hyper_params = definition.update_hyper_params(**overrides)
    while True:
        try:
            return definition.compute_updates(hyper_params, params, state, grads, **taken)
        except UnusedArgumentError as error:  # known only after tracing
            if not error.names & taken.keys():
                raise
            taken = {k: v for k, v in taken.items() if k not in error.names}
