"""Triples as opt-core optimizer definitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from opt_core import Optimizer as CoreOptimizer
from opt_core import OptimizerDef, check_gradients, increment_step
from opt_core import OptimizerState as CoreState

from opt_legacy_stax._optimizers import Optimizer, OptimizerState
from opt_legacy_stax._slots import (
    check_made_by,
    init_split,
    join,
    split,
    update_split,
    whole_step,
)


@dataclasses.dataclass(frozen=True)
class TripleHyperParams:
    """Empty: the hyper-parameters of a triple are captured in its closures."""


class TripleDef(OptimizerDef):
    """Wraps a triple as an `OptimizerDef`.

    The target holds the parameters, each parameter state holds the triple's other arrays for that
    parameter, and `state.step` is the triple's `i`. Updates are computed by the triple itself.

    Args:
      triple: the triple to wrap.

    Attributes:
      triple: the wrapped triple.
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
        """Applies one update of the triple.

        Raises:
          TreeMismatchError: `grads` does not match the structure of `params`.
        """
        del hyper_params
        check_gradients(params, grads)
        params, slots = update_split(self.triple, state.step, grads, params, state.param_states)
        return params, CoreState(increment_step(state.step), slots)

    def convert_state(self, state: OptimizerState, i: Any) -> CoreOptimizer:
        """Returns an optimizer that continues from a state of the triple.

        Args:
          state: a state of the triple.
          i: number of updates already made, i.e. the `i` of the next update.

        Raises:
          LayoutError: `state` does not have the layout that the triple creates.
          StepError: `i` is not a non-negative integer.
        """
        check_made_by(self.triple, state)
        params, slots = split(self.triple, state)
        core_state = CoreState(whole_step(i), slots)
        return CoreOptimizer(optimizer_def=self, state=core_state, target=params)

    def convert_state_back(self, optimizer: CoreOptimizer) -> tuple[OptimizerState, Any]:
        """Returns the state of the triple, and the `i` of its next update."""
        return join(optimizer.target, optimizer.state.param_states), optimizer.state.step

    def derive_logical_axes(self, optimizer: CoreOptimizer, param_axes: Any) -> CoreOptimizer:
        """Returns the optimizer with each leaf replaced by its logical axes.

        The state of a parameter depends on that parameter alone, so its dimensions are matched to
        those of the parameter by size, on a probe whose dimensions all have different sizes. If two
        state dimensions match the same parameter dimension, as in an `(n, n)` matrix kept for a
        vector of size `n`, only the first gets its axis.

        Args:
          optimizer: an optimizer of this definition, with arrays or `jax.ShapeDtypeStruct` leaves.
          param_axes: a tree with the structure of the parameters and a `PartitionSpec` or `None`
            per leaf.

        Returns:
          An `Optimizer` with the axes as its target and `None` as its step. State leaves that share
          no dimension with their parameter are `None`.
        """
        tree_def: Any
        leaves, tree_def = jax.tree.flatten(optimizer.target)
        axes = tree_def.flatten_up_to(param_axes)
        kept = tree_def.flatten_up_to(optimizer.state.param_states)
        derived = [_axes_of(self.triple, *each) for each in zip(leaves, axes, kept, strict=True)]
        state = CoreState(step=None, param_states=jax.tree.unflatten(tree_def, derived))
        return CoreOptimizer(optimizer_def=self, state=state, target=param_axes)


def _axes_of(triple: Optimizer, param: Any, axes: Any, kept: Any) -> Any:
    """Returns the logical axes of the state of one parameter."""
    # distinct sizes that are neither sums nor products of one another
    sizes = {1009 + 101 * n: n for n in range(np.ndim(param))}
    probe = jax.ShapeDtypeStruct(tuple(sizes), jnp.result_type(param))
    found = jax.eval_shape(lambda p: init_split(triple, p), probe)
    names = [*(axes or ()), *[None] * np.ndim(param)]
    specs = []
    for leaf in jax.tree.leaves(found):
        followed = [sizes.get(dim) for dim in leaf.shape]
        # A mesh axis may occur only once in a spec: the first matching dimension gets it.
        spec = [
            None if n is None or n in followed[:k] else names[n] for k, n in enumerate(followed)
        ]
        specs.append(PartitionSpec(*spec) if any(name is not None for name in spec) else None)
    before: Any = jax.tree.structure(kept)
    after: Any = jax.tree.structure(found)
    if before != after:  # `init` depends on the sizes, so the probe says nothing
        specs = [None] * before.num_leaves
    return jax.tree.unflatten(before, specs)
