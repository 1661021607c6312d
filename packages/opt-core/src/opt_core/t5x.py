"""What the T5X facades share: lenient restoring, as T5X's code expects.

T5X's partitioner writes the axes of an optimizer into a state dict, changes them there and restores
them into the optimizer of arrays; its checkpointer saves parameters in bfloat16 on request. So the
facades adapt the reference to what is restored, and are otherwise as strict as `opt_core`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from opt_core._optimizer import OptimizerState
from opt_core._trees import children, held_dtype

__all__ = ["lenient_references"]


def lenient_references(
    target: Any, state: OptimizerState, state_dict: Any
) -> tuple[Any, OptimizerState]:
    """Returns reference parameters and state adapted to the state dict to be restored.

    A facade passes them to `OptimizerDef.restore_state` instead of its own. They take over every
    `PartitionSpec` and `None` of the state dict, and the dtype of parameters in another precision.
    Everything else is unchanged and must match.

    Args:
      target: the parameters.
      state: the state that belongs to them.
      state_dict: see `OptimizerDef.restore_state`; anything but a mapping has no effect.

    Examples:
      >>> params = {'w': jnp.zeros(2), 'b': jnp.zeros(1)}
      >>> given = {'target': {'w': PartitionSpec('embed'), 'b': jnp.ones(1, jnp.bfloat16)}}
      >>> like, _ = lenient_references(params, OptimizerState(0, ()), given)
      >>> isinstance(like['w'], PartitionSpec), like['b'].dtype.name
      (True, 'bfloat16')
    """
    return (
        _like(_param_like, target, _entry(state_dict, "target")),
        _like(_leaf_like, state, _entry(state_dict, "state")),
    )


def _entry(state_dict: Any, name: str) -> Any:
    return state_dict.get(name) if isinstance(state_dict, Mapping) else None


def _like(leaf_like: Callable[[Any, Any], Any], reference: Any, value: Any) -> Any:
    node = children(reference)
    if node is None:
        return leaf_like(reference, value)
    entries = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}
    return node.rebuild(
        [_like(leaf_like, c, entries[name]) if name in entries else c for name, c in node.children]
    )


def _leaf_like(reference: Any, value: Any) -> Any:
    if value is None or isinstance(value, PartitionSpec) or not hasattr(reference, "shape"):
        return reference if isinstance(value, Mapping) else value
    return reference


def _param_like(reference: Any, value: Any) -> Any:
    like = _leaf_like(reference, value)
    if not (hasattr(like, "dtype") and hasattr(value, "dtype")):
        return like
    dtype = held_dtype(value)
    if dtype == held_dtype(like) or not _is_other_precision(like.dtype, dtype):
        return like
    is_placed = isinstance(like, jax.ShapeDtypeStruct) or getattr(like, "committed", False)
    sharding = like.sharding if is_placed else None
    return jax.ShapeDtypeStruct(like.shape, dtype, sharding=sharding)


def _is_other_precision(own: Any, other: Any) -> bool:
    kinds = (jnp.floating, jnp.complexfloating)
    return any(jnp.issubdtype(own, kind) and jnp.issubdtype(other, kind) for kind in kinds)
