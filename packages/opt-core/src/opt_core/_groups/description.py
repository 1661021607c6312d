"""What the state of several groups means: each group's definition describes its own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._description.describe import describe_state
from opt_core._description.values import LeafDescription, StateDescription
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import Names, flatten_with_paths

if TYPE_CHECKING:
    from opt_core._groups.multi_optimizer import MultiOptimizer


def describe_groups(
    definition: MultiOptimizer, params: Any, state: OptimizerState
) -> StateDescription:
    """Returns the descriptions of all groups as one; see `MultiOptimizer.describe_state`."""
    leaves, structure = jax.tree.flatten(state.param_states)
    positions = jax.tree.unflatten(structure, range(len(leaves)))
    paths = {i: names for names, i in flatten_with_paths(positions) if i is not None}
    target = jax.tree.map(_abstract, params)
    # By identity: a group's definition may see the parameters at other paths.
    known = {id(leaf): names for names, leaf in flatten_with_paths(target) if leaf is not None}
    whole = Optimizer(definition, OptimizerState(state.step, positions), target)
    found: dict[int, LeafDescription] = {}
    transformations = []
    for name, part in definition.split(whole).items():
        own = part.state.param_states
        states = jax.tree.map(lambda i: leaves[i], own)
        inner = describe_state(part.optimizer_def, part.target, OptimizerState(state.step, states))
        renamed = {
            names: known[id(leaf)]
            for names, leaf in flatten_with_paths(part.target)
            if leaf is not None
        }
        for i, leaf in zip(jax.tree.leaves(own), inner.leaves, strict=True):
            found[i] = dataclasses.replace(
                leaf,
                path=paths[i],
                group=(name, *leaf.group),
                parameter=_renamed(leaf.parameter, renamed),
            )
        transformations += [
            dataclasses.replace(
                made,
                group=(name, *made.group),
                parameters=made.parameters and tuple(renamed[param] for param in made.parameters),
            )
            for made in inner.transformations
        ]
    return StateDescription(tuple(found[i] for i in range(len(leaves))), tuple(transformations))


def _renamed(parameter: Names | None, renamed: dict[Names, Names]) -> Names | None:
    return None if parameter is None else renamed[parameter]


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """A distinct object per leaf, also for one that occurs twice in a tree."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)
