"""Triples as opt-core optimizer definitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from opt_core import Optimizer as CoreOptimizer
from opt_core import OptimizerDef, check_gradients, increment_step
from opt_core import OptimizerState as CoreState

from opt_legacy_stax._optimizers import Optimizer, OptimizerState
from opt_legacy_stax._slots import convert, init_split, join, update_split


@dataclasses.dataclass(frozen=True)
class TripleHyperParams:
    """Empty: the hyper-parameters of a triple are captured in its closures."""


class TripleDef(OptimizerDef):
    """A triple as an `OptimizerDef`, whose updates the triple itself computes.

    The target holds the parameters, each parameter state the triple's other arrays for that
    parameter, and `state.step` is the triple's `i`.

    Args:
      triple: the triple to wrap.
    """

    triple: Optimizer

    def __init__(self, triple: Optimizer) -> None:
        super().__init__(TripleHyperParams())
        self.triple = Optimizer(*triple)

    def init_state(self, params: Any) -> CoreState:
        """Returns the state before the first update; see `OptimizerDef.init_state`."""
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            shapes: CoreState = jax.eval_shape(self.init_state, params)
            return shapes
        slots = init_split(self.triple, params)
        return CoreState(step=jnp.zeros((), jnp.int32), param_states=slots)

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: CoreState, grads: Any
    ) -> tuple[Any, CoreState]:
        """Applies one update of the triple; see `OptimizerDef.apply_gradient`.

        Raises:
          TreeMismatchError: `grads` does not match the structure of `params`.
        """
        del hyper_params
        check_gradients(params, grads)
        params, slots = update_split(self.triple, state.step, grads, params, state.param_states)
        return params, CoreState(increment_step(state.step), slots)

    def convert_state(self, state: OptimizerState, i: Any) -> CoreOptimizer:
        """Returns the optimizer that continues from a state of the triple before update `i`.

        Raises:
          LayoutError: `state` does not have the layout that the triple creates.
          StepError: `i` is not a non-negative integer.
        """
        params, slots, step = convert(self.triple, state, i)
        return CoreOptimizer(optimizer_def=self, state=CoreState(step, slots), target=params)

    def convert_state_back(self, optimizer: CoreOptimizer) -> tuple[OptimizerState, Any]:
        """Returns the state of the triple, and the `i` of its next update."""
        return join(optimizer.target, optimizer.state.param_states), optimizer.state.step
