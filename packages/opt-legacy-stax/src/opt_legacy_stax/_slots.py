"""What is kept beside the parameters: a state, taken apart and put together again.

Outside of this module parameters and optimizer state are two trees. What a triple keeps for a
parameter mostly holds the parameter itself; there a `ParamSlot` takes its place, and the parameters
exist once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from opt_legacy_stax._dtypes import strong_param
from opt_legacy_stax._optimizers import Optimizer, OptimizerState
from opt_legacy_stax._states import check_state
from opt_legacy_stax._trees import leaf_paths
from opt_legacy_stax.errors import LayoutError, StateChangedError


class ParamSlot:
    """A node without leaves, where the parameter goes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParamSlot)

    def __hash__(self) -> int:
        return hash(ParamSlot)

    def __repr__(self) -> str:
        return "ParamSlot()"


jax.tree_util.register_pytree_node(ParamSlot, lambda _: ((), None), lambda *_: ParamSlot())


def split(triple: Optimizer, state: OptimizerState) -> tuple[Any, Any]:
    """Returns the parameters, and what is kept beside them.

    Args:
      triple: the optimizer.
      state: its state.

    Returns:
      The parameters; and a tree like them that has, for each, the subtree kept for it, with a
      `ParamSlot` in place of the parameter itself. A subtree that holds its parameter in another
      form, as `sm3` holds scalars, has none, and is complete.
    """
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
    """Returns the state that `split` took apart.

    Args:
      params: the parameters, changed since or not. Where a subtree has no `ParamSlot`, its own
        parameter holds.
      slots: what is kept beside them.
    """
    tree_def: Any
    leaves, tree_def = jax.tree.flatten(params)
    packed, subtree_defs = [], []
    for param, subtree in zip(leaves, tree_def.flatten_up_to(slots), strict=True):
        kept, subtree_def = jax.tree.flatten(subtree, is_leaf=_is_slot)
        packed.append([param if _is_slot(leaf) else leaf for leaf in kept])
        subtree_defs.append(subtree_def)
    return OptimizerState(tuple(packed), tree_def, tuple(subtree_defs))


def check_made_by(triple: Optimizer, state: Any) -> None:
    """Raises unless a state looks like one that `triple` makes for its parameters.

    Raises:
      LayoutError: it does not.
    """
    check_state(state)
    try:
        params = jax.eval_shape(triple.params_fn, state)
        made = jax.eval_shape(triple.init_fn, params)
    except LayoutError:
        raise
    except Exception as error:
        raise LayoutError(
            "`state` is not one of the triple, whose functions do not take it "
            f"({type(error).__name__}). Convert it with the triple that made it."
        ) from error
    paths: list[str] = leaf_paths(state[1])
    for path, *kept in zip(paths, made[0], made[2], state[0], state[2], strict=True):
        shapes = [list(map(jnp.shape, leaves)) for leaves in (kept[0], kept[2])]
        if kept[1] != kept[3] or shapes[0] != shapes[1]:
            raise LayoutError(
                f"`state` is not one of the triple: for parameter `{path}` expected {kept[1]} of "
                f"shapes {shapes[0]}, found {kept[3]} of {shapes[1]}. Convert it with the triple "
                "that made it."
            )


def init_split(triple: Optimizer, params: Any) -> Any:
    """Returns what is kept beside `params` before the first update."""
    return split(triple, triple.init_fn(params))[1]


def update_split(triple: Optimizer, i: Any, grads: Any, params: Any, slots: Any) -> tuple[Any, Any]:
    """Returns the parameters and what is kept beside them after an update.

    Raises:
      StateChangedError: the triple moved a parameter to another place of its state.
    """
    state = triple.update_fn(i, grads, join(params, slots))
    new_params, new_slots = split(triple, state)
    before: Any = jax.tree.structure(slots)
    after: Any = jax.tree.structure(new_slots)
    if before != after:
        raise StateChangedError(
            f"the update changed the structure of what is kept: expected {before}, found {after}. "
            "Return the same containers as `init` does."
        )
    return new_params, new_slots


def _array(leaf: Any) -> Any:
    return jnp.asarray(leaf, jnp.result_type(leaf)) if isinstance(leaf, int) else strong_param(leaf)


def _is_slot(node: Any) -> bool:
    return isinstance(node, ParamSlot)


def _positions(params_fn: Callable[[Any], Any], state: OptimizerState) -> list[int | None]:
    """Returns which leaf of each parameter's state `params_fn` returns, as it is, if any.

    `params_fn` is traced, not run: what comes out is compared with what went in.
    """
    found: list[int | None] = []

    def look(traced: OptimizerState) -> None:
        params = jax.tree.leaves(params_fn(traced))
        for param, leaves in zip(params, traced.packed_state, strict=True):
            same = [j for j, leaf in enumerate(leaves) if leaf is param]
            found.append(same[0] if same else None)

    jax.eval_shape(look, OptimizerState(*state))
    return found
