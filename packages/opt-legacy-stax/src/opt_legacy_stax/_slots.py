"""The state of a triple as two trees, as Optax and opt-core keep it: parameters, and slots.

A slot is the state of one parameter, in which a `ParamSlot` stands for the parameter itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._optimizers import (
    Optimizer,
    OptimizerState,
    check_state,
    check_step,
    strong_param,
    unpacked,
)
from opt_legacy_stax._trees import layout_difference
from opt_legacy_stax.errors import LayoutError, StepError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParamSlot:
    """A node without leaves that marks the position of the parameter in its slot."""


def split(triple: Optimizer, state: OptimizerState) -> tuple[Any, Any]:
    """Splits a state into parameters and slots."""
    packed, tree_def, subtree_defs = state
    positions = _positions(triple.params_fn, state)
    subtrees = []
    for leaves, subtree_def, position in zip(packed, subtree_defs, positions, strict=True):
        kept = list(leaves)
        if position is not None:
            kept[position] = ParamSlot()
        subtrees.append(jax.tree.unflatten(subtree_def, kept))
    params = jax.tree.map(strong_param, triple.params_fn(state))
    return params, jax.tree.map(_array, jax.tree.unflatten(tree_def, subtrees))


def join(params: Any, slots: Any) -> OptimizerState:
    """Inverts `split`."""
    tree_def: Any
    leaves, tree_def = jax.tree.flatten(params)
    packed, subtree_defs = [], []
    for param, subtree in zip(leaves, tree_def.flatten_up_to(slots), strict=True):
        kept, subtree_def = jax.tree.flatten(subtree, is_leaf=_is_slot)
        packed.append([param if _is_slot(leaf) else leaf for leaf in kept])
        subtree_defs.append(subtree_def)
    return OptimizerState(tuple(packed), tree_def, tuple(subtree_defs))


def convert(triple: Optimizer, state: OptimizerState, i: Any) -> tuple[Any, Any, Any]:
    """Returns the parameters, slots and step that continue from a state before update `i`."""
    _check_made_by(triple, state)
    step = check_step(i)
    is_whole = not isinstance(step, float | np.floating) or float(step).is_integer()
    if not isinstance(step, jax.core.Tracer) and (step < 0 or not is_whole):
        raise StepError(f"`i` must be a number of updates; got {step}. Pass a whole number.")
    return *split(triple, state), jnp.asarray(step, jnp.int32)


def _check_made_by(triple: Optimizer, state: Any) -> None:
    """Checks that a state has the layout that `triple` creates for its parameters."""
    check_state(state)
    try:
        params = jax.eval_shape(triple.params_fn, state)
        start = jax.eval_shape(triple.init_fn, params)
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            f"`state` is not a state of the triple, whose functions raise {type(error).__name__} "
            "for it. Use the triple that created it."
        ) from error
    trees = [jax.tree.unflatten(each[1], unpacked(each)) for each in (start, state)]
    if lines := layout_difference(*trees):
        raise LayoutError(
            f"`state` is not a state of the triple:\n{lines}\nUse the triple that created it."
        )


def init_split(triple: Optimizer, params: Any) -> Any:
    """Returns the initial slots for `params`."""
    return split(triple, triple.init_fn(params))[1]


def update_split(triple: Optimizer, i: Any, grads: Any, params: Any, slots: Any) -> tuple[Any, Any]:
    """Returns the parameters and slots after one update."""
    return split(triple, triple.update_fn(i, grads, join(params, slots)))


def _array(leaf: Any) -> Any:
    return jnp.asarray(leaf, jnp.result_type(leaf)) if isinstance(leaf, int) else strong_param(leaf)


def _is_slot(node: Any) -> bool:
    return isinstance(node, ParamSlot)


def _positions(params_fn: Callable[[Any], Any], state: OptimizerState) -> list[int | None]:
    """Returns for each parameter the index of the leaf that `params_fn` returns, or `None`."""
    positions: list[int | None] = []

    def trace(traced: OptimizerState) -> None:
        params = jax.tree.leaves(params_fn(traced))
        for param, leaves in zip(params, traced.packed_state, strict=True):
            positions.append(next((j for j, leaf in enumerate(leaves) if leaf is param), None))

    jax.eval_shape(trace, OptimizerState(*state))
    return positions
