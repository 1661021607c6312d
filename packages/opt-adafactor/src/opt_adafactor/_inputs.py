"""Validation and flattening of the inputs of an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import HyperParamError, TreeMismatchError
from opt_core.extend import split_path

from opt_adafactor._plan import Plan
from opt_adafactor._state import Slots, _AdafactorParamState, slot_shapes


def learning_rate(hyper_params: Any, step: Any) -> Any:
    """Returns the learning rate of a step.

    Raises:
      HyperParamError: no learning rate is given.
    """
    rate = hyper_params.learning_rate
    if rate is None:
        raise HyperParamError(
            "no `learning_rate`: pass one to the definition, or to every step as "
            "`apply_gradient(grads, learning_rate=...)`"
        )
    return rate(step) if callable(rate) else rate


def flatten_states(plan: Plan, param_states: Any) -> list[_AdafactorParamState]:
    """Returns the state of every parameter, in the order of the plan.

    Raises:
      TreeMismatchError: the states do not match the structure of the parameters.
    """
    try:
        states = plan.treedef.flatten_up_to(param_states)
    except ValueError as error:
        raise TreeMismatchError(
            f"`param_states` do not have the tree structure of the parameters: {error}. Create the "
            "state for these parameters, and restore into it."
        ) from None
    for path, state in zip(plan.paths, states, strict=True):
        if not isinstance(state, _AdafactorParamState):
            raise TreeMismatchError(
                f"`param_states` of `{path}`: expected an Adafactor parameter state, found a "
                f"{type(state).__name__}"
            )
    return [jax.tree.map(jnp.asarray, state) for state in states]


def check_slots(
    plan: Plan, params: Sequence[Any], slots: Sequence[Slots], *, has_momentum: bool
) -> None:
    """Checks that the statistics of every parameter have the shapes that its rule implies.

    Raises:
      TreeMismatchError: a shape differs; lists all paths.
    """
    lines = []
    for path, param, factoring, found in zip(
        plan.paths, params, plan.factorings, slots, strict=True
    ):
        expected = slot_shapes(np.shape(param), factoring)
        for name, shape, slot in zip(Slots._fields, expected, found, strict=True):
            if shape is None or (name == "m" and not has_momentum):
                continue
            if slot is None or np.shape(slot) != shape:
                shown = "none" if slot is None else np.shape(slot)
                lines.append(f"{path}: expected `{name}` of shape {shape}, found {shown}")
    if lines:
        raise TreeMismatchError(
            "the state does not match the parameters:\n  "
            + "\n  ".join(lines)
            + "\nIt was created with different shapes, factor rules, "
            "`min_dim_size_to_factor` or `beta1`: use the settings it was created with, or create "
            "a new state."
        )


def put_slots(old: _AdafactorParamState, new: Slots) -> _AdafactorParamState:
    """Returns a state with new slots; unused ones are kept."""
    return old.replace(**{k: slot for k, slot in new._asdict().items() if slot is not None})


def nest(path: str, leaf: Any) -> Any:
    """Returns a nested dict with a single leaf at a `/`-joined path."""
    for key in reversed(split_path(path)):
        leaf = {key: leaf}
    return leaf


def at(tree: Any, path: str) -> Any:
    """Returns the subtree at a `/`-joined path."""
    for key in split_path(path):
        tree = tree[key]
    return tree
