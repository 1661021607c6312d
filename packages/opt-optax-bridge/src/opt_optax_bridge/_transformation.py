"""A definition as an Optax transformation: the way back, for what takes nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from opt_core import MultiOptimizer, Optimizer, OptimizerDef, OptimizerState
from opt_core.errors import UnusedArgumentError
from opt_core.protocols import (
    TakesArgsOfParams,
    TakesExtraArgs,
    TakesPerExampleGrads,
    Transformation,
)

from opt_optax_bridge._wrapper import OptaxWrapper


def as_transformation(definition: Any) -> optax.GradientTransformationExtraArgs:
    """Returns a definition as an Optax transformation.

    For what takes nothing else: `optax.chain`, `TrainState.create(tx=...)`, `nnx.Optimizer`, loops
    with `tx.update`. Hyper-parameters and extra arguments are keywords of its `update`
    (`learning_rate=`, `group_overrides=`). A keyword that the definition does not know is ignored,
    as in Optax, where a chain hands every keyword to all of its parts.

    The state is Optax's own for a wrapped optimizer, an `OptimizerState` for any other definition.
    A definition that returns parameters and not updates (`opt_adafactor.Adafactor`) is subtracted
    from them: adding its updates again is exact but for round-off.

    Args:
      definition: any `OptimizerDef`: groups, Adafactor, a twin.

    Raises:
      TypeError: it is no definition.

    Examples:
      >>> import opt_optax_bridge as opt
      >>> groups = MultiOptimizer(('w', opt.sgd(0.5)), ('b', opt.adam(0.1)), names=['w', 'b'])
      >>> tx = optax.chain(optax.clip(1.0), as_transformation(groups))
      >>> params = {'w': jnp.ones(1), 'b': jnp.ones(1)}
      >>> updates, state = tx.update({'w': jnp.ones(1), 'b': jnp.ones(1)}, tx.init(params), params)
      >>> updates['w'].tolist()
      [-0.5]
    """
    if isinstance(definition, Optimizer):
        raise TypeError(
            "`as_transformation` takes a definition; got an Optimizer. Write "
            "`as_transformation(optimizer.optimizer_def)`."
        )
    if not isinstance(definition, OptimizerDef):
        is_one = isinstance(definition, Transformation)
        hint = "It is a transformation already." if is_one else "Call its constructor first."
        raise TypeError(
            f"`as_transformation` takes a definition; got a {type(definition).__name__}. {hint}"
        )
    updates = _Updates(definition)
    is_wrapper = isinstance(definition, OptaxWrapper)

    def init(params: Any) -> Any:
        state = updates.init_state(params)
        return state.param_states if is_wrapper else state

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None and not is_wrapper:
            raise ValueError(
                f"`params`: a {type(definition).__name__} needs them; call "
                "`tx.update(grads, state, params)`"
            )
        whole = OptimizerState(_zero(), state) if is_wrapper else state
        found, new = updates.update(params, whole, grads, extra_args)
        return found, new.param_states if is_wrapper else new

    return optax.GradientTransformationExtraArgs(init, update)


class _Updates(OptimizerDef):
    """A definition with updates in the place of the parameters that it returns."""

    def __init__(self, definition: OptimizerDef) -> None:
        super().__init__(definition.hyper_params)
        self.definition = definition
        self.whole_tree = definition.whole_tree  # type: ignore[misc]
        self._groups = None
        if isinstance(definition, MultiOptimizer):
            self._groups = definition.with_groups(
                [
                    group
                    if not isinstance(group.definition, OptimizerDef)
                    else dataclasses.replace(group, definition=_Updates(group.definition))
                    for group in definition.groups
                ]
            )

    def init_state(self, params: Any) -> OptimizerState:
        return (self._groups or self.definition).init_state(params)

    def update_hyper_params(self, **overrides: Any) -> Any:
        return self.definition.update_hyper_params(**overrides)

    def has_hyper_param(self, name: str) -> bool:
        return self.definition.has_hyper_param(name)

    def apply_gradient(
        self,
        hyper_params: Any,
        params: Any,
        state: OptimizerState,
        grads: Any,
        **extra_args: Any,
    ) -> tuple[Any, OptimizerState]:
        definition = self.definition
        if self._groups is not None:
            updates, state = self._groups.apply_gradient(
                hyper_params, params, state, grads, **extra_args
            )
            return self._without_frozen(updates), state
        if isinstance(definition, OptaxWrapper):
            return definition.updates(hyper_params, params, state, grads, **extra_args)
        apply: Any = definition.apply_gradient
        new, state = apply(hyper_params, params, state, grads, **extra_args)
        return jax.tree.map(jnp.subtract, new, params), state

    def _without_frozen(self, updates: Any) -> Any:
        """Zeros for what no group updates: there, groups return the parameters as they are."""
        assert self._groups is not None
        selection = self._groups.select(updates)
        leaves = jax.tree.leaves(updates)
        for part in selection.parts:
            if part.group.is_frozen:
                for i in part.members:
                    leaves[i] = jnp.zeros_like(leaves[i])
        return selection.treedef.unflatten(leaves)

    def update(
        self, params: Any, state: OptimizerState, grads: Any, given: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Makes one update with those of the keywords that the definition knows."""
        reserved = {"hyper_params"}
        if self._groups is not None:
            reserved.add("group_overrides")
        overrides = {k: v for k, v in given.items() if k in reserved or self.has_hyper_param(k)}
        rest = {k: v for k, v in given.items() if k not in overrides}
        taken = {name: rest[name] for name in self.extra_arg_names(rest)}
        hyper_params = self.definition._overridden("ignore", overrides)
        while True:
            try:
                return self.apply_gradient(hyper_params, params, state, grads, **taken)
            except UnusedArgumentError as error:  # known only once it is traced
                if not error.names & taken.keys():
                    raise
                taken = {k: v for k, v in taken.items() if k not in error.names}

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        definition = self.definition
        if not isinstance(definition, TakesExtraArgs):
            return frozenset()
        return definition.extra_arg_names(names)

    def args_of_params(self, names: Iterable[str]) -> frozenset[str]:
        definition = self.definition
        if not isinstance(definition, TakesArgsOfParams):
            return frozenset()
        return definition.args_of_params(names)

    def takes_per_example_grads(self, params: Any, state: OptimizerState, grads: Any) -> bool:
        definition = self._groups or self.definition
        return isinstance(definition, TakesPerExampleGrads) and definition.takes_per_example_grads(
            params, state, grads
        )


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)
