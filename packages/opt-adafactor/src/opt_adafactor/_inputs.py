"""What a step of the definition is given, checked and taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import split_path
from opt_core.errors import HyperParamError, TreeMismatchError

from opt_adafactor._plan import Plan
from opt_adafactor._state import Slots, _AdafactorParamState, slot_shapes


def learning_rate(hyper_params: Any, step: Any) -> Any:
    """Returns the learning rate of a step.

    Raises:
      HyperParamError: there is none.
    """
    rate = hyper_params.learning_rate
    if rate is None:
        raise HyperParamError(
            "no `learning_rate`: give one to the definition, or with every step "
            "(`apply_gradient(grads, learning_rate=...)`)"
        )
    return rate(step) if callable(rate) else rate


def flatten_states(plan: Plan, param_states: Any) -> list[_AdafactorParamState]:
    """Returns the state of every parameter, in the order of the plan.

    Raises:
      TreeMismatchError: they do not look like the parameters.
    """
    try:
        states = plan.treedef.flatten_up_to(param_states)
    except ValueError as error:
        raise TreeMismatchError(
            "`param_states` have other containers or keys than the parameters: "
            f"{error}. Create the state of these parameters, or restore into that."
        ) from None
    for path, state in zip(plan.paths, states, strict=True):
        if not isinstance(state, _AdafactorParamState):
            raise TreeMismatchError(
                f"`param_states` of `{path}`: expected the state of one parameter, found a "
                f"{type(state).__name__}"
            )
    return [jax.tree.map(jnp.asarray, state) for state in states]


def check_slots(
    plan: Plan, params: Sequence[Any], slots: Sequence[Slots], *, has_momentum: bool
) -> None:
    """Raises unless the statistics of every parameter have the shapes that its rule gives them.

    Raises:
      TreeMismatchError: lists every path.
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
                lines.append(f"{path}: `{name}` of shape {shape} expected, found {shown}")
    if lines:
        raise TreeMismatchError(
            "the state does not fit the parameters:\n  " + "\n  ".join(lines) + "\nIt was made "
            "for other shapes, factor rules, `min_dim_size_to_factor` or `beta1`: create it with "
            "these, or restore one that was."
        )


def put_slots(old: _AdafactorParamState, new: Slots) -> _AdafactorParamState:
    """Returns a state with new slots; unused ones stay as they are."""
    return old.replace(**{k: slot for k, slot in new._asdict().items() if slot is not None})


def nest(path: str, leaf: Any) -> Any:
    """Returns a tree with one leaf, at a `/`-joined path."""
    for key in reversed(split_path(path)):
        leaf = {key: leaf}
    return leaf


def at(tree: Any, path: str) -> Any:
    """Returns what is at a `/`-joined path."""
    for key in split_path(path):
        tree = tree[key]
    return tree
