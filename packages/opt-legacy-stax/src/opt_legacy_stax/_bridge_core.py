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

    def derive_logical_axes(self, optimizer: CoreOptimizer, param_axes: Any) -> CoreOptimizer:
        """Returns the optimizer with each leaf replaced by its logical axes.

        The dimensions of a state are matched to those of its parameter by size, on a probe whose
        dimensions all have different sizes. If two match the same one, as in an `(n, n)` matrix
        kept for a vector of size `n`, only the first gets its axis.

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
        slots = tree_def.flatten_up_to(optimizer.state.param_states)
        derived = [_axes_of(self.triple, *each) for each in zip(leaves, axes, slots, strict=True)]
        state = CoreState(step=None, param_states=jax.tree.unflatten(tree_def, derived))
        return CoreOptimizer(optimizer_def=self, state=state, target=param_axes)


def _axes_of(triple: Optimizer, param: Any, axes: Any, slot: Any) -> Any:
    """Returns the logical axes of the state of one parameter."""
    # distinct sizes that are neither sums nor products of one another
    sizes = {1009 + 101 * n: n for n in range(np.ndim(param))}
    probe = jax.ShapeDtypeStruct(tuple(sizes), jnp.result_type(param))
    leaves, probed = jax.tree.flatten(jax.eval_shape(lambda p: init_split(triple, p), probe))
    tree_def: Any = jax.tree.structure(slot)
    if probed != tree_def:  # `init` depends on the sizes, so the probe says nothing
        return jax.tree.unflatten(tree_def, [None] * tree_def.num_leaves)
    names = [*(axes or ()), *[None] * np.ndim(param)]
    specs = []
    for leaf in leaves:
        dims = [sizes.get(size) for size in leaf.shape]
        # A mesh axis may occur only once in a spec: the first matching dimension gets it.
        spec = [None if n is None or n in dims[:k] else names[n] for k, n in enumerate(dims)]
        specs.append(PartitionSpec(*spec) if any(name is not None for name in spec) else None)
    return jax.tree.unflatten(tree_def, specs)
