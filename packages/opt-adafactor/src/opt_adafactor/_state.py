"""The state of one parameter, in T5X's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from opt_core.errors import TreeMismatchError

from opt_adafactor._axes import axes_by_path, check_covers, flatten_axes
from opt_adafactor._factoring import Factoring
from opt_adafactor._plan import Plan

# Not `jnp.float32`, which is callable: `optax.inject_hyperparams` would take it for a schedule.
FLOAT32 = np.dtype("float32")
FIELDS = ("v_row", "v_col", "v", "m")


class _AdafactorParamState(flax.struct.PyTreeNode):
    """The state of one parameter in T5X's layout; unused slots are float32 zeros of shape (1,).

    Attributes:
      v_row: float32; the parameter's shape without the column dimensions.
      v_col: float32; the parameter's shape without the row dimensions.
      v: float32; the parameter's shape; used if it is not factored.
      m: momentum; the parameter's shape. `None` in states of Optax without momentum.
    """

    v_row: Any
    v_col: Any
    v: Any
    m: Any


def placeholder() -> jax.Array:
    """Returns the placeholder for an unused slot."""
    return jnp.zeros((1,), jnp.float32)


def init_states(plan: Plan, params: Any, momentum_dtype: Any) -> list[_AdafactorParamState]:
    """Returns zeros for every parameter, sharded like the dimensions that they keep.

    `params` are arrays, tracers or `jax.ShapeDtypeStruct`s; a dtype of `None` is no momentum.
    """

    def init(param: Any, factoring: Factoring) -> _AdafactorParamState:
        slots = {}
        for name, dims in kept_dims(factoring, has_momentum=momentum_dtype is not None).items():
            dtype = momentum_dtype if name == "m" else jnp.float32
            slots[name] = placeholder() if dims is None else _zeros(param, dims, dtype)
        return _AdafactorParamState(**slots)

    leaves = plan.treedef.flatten_up_to(params)
    return [init(*pair) for pair in zip(leaves, plan.factorings, strict=True)]


def kept_dims(factoring: Factoring, *, has_momentum: bool) -> dict[str, tuple[int, ...] | None]:
    """Returns which dimensions of a parameter each slot keeps; `None` for unused slots."""
    everything = tuple(range(factoring.rank))
    is_factored = factoring.is_factored
    return {
        "v_row": factoring.row_dims if is_factored else None,
        "v_col": factoring.col_dims if is_factored else None,
        "v": None if is_factored else everything,
        "m": everything if has_momentum else None,
    }


def derive_axes(
    plan: Plan, params: Any, param_axes: Any, *, has_momentum: bool
) -> tuple[list[PartitionSpec | None], list[_AdafactorParamState]]:
    """Returns the logical axes of every parameter and of its state, in the order of the plan."""
    try:
        given = plan.treedef.flatten_up_to(param_axes)
    except (ValueError, TypeError, KeyError):
        axes = flatten_axes(param_axes)  # different container types, or different parameters
    else:
        axes = axes_by_path(zip(plan.paths, given, strict=True))
    leaves = plan.treedef.flatten_up_to(params)
    check_covers({p: np.shape(x) for p, x in zip(plan.paths, leaves, strict=True)}, axes)
    states = []
    for path, factoring in zip(plan.paths, plan.factorings, strict=True):
        spec, kept = axes[path], kept_dims(factoring, has_momentum=has_momentum)
        slots = {
            name: None if spec is None or dims is None else PartitionSpec(*(spec[d] for d in dims))
            for name, dims in kept.items()
        }
        states.append(_AdafactorParamState(**slots))
    return [axes[path] for path in plan.paths], states


def check_states(
    plan: Plan,
    params: Sequence[Any],
    states: Sequence[_AdafactorParamState],
    *,
    has_momentum: bool,
) -> None:
    """Raises a `TreeMismatchError` unless the states have the shapes that the rules imply."""
    lines = []
    for path, param, factoring, state in zip(
        plan.paths, params, plan.factorings, states, strict=True
    ):
        for name, dims in kept_dims(factoring, has_momentum=has_momentum).items():
            slot = getattr(state, name)
            shape = None if dims is None else tuple(np.shape(param)[dim] for dim in dims)
            if shape is not None and (slot is None or np.shape(slot) != shape):
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


def _zeros(param: Any, dims: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns zeros over some dimensions of a parameter, sharded like those dimensions."""
    shape = np.shape(param)
    if len(dims) == len(shape):
        return jnp.zeros_like(param, dtype=dtype)
    if not _is_sharded_in_types(param):
        return jnp.zeros([shape[dim] for dim in dims], dtype)
    dropped = tuple(dim for dim in range(len(shape)) if dim not in dims)
    # A sum keeps the sharding of the remaining dimensions in every JAX version.
    return jnp.sum(jnp.zeros_like(param, dtype=dtype), axis=dropped)


def _is_sharded_in_types(param: Any) -> bool:
    """Whether a parameter's type carries a sharding, i.e. its mesh has Explicit axes."""
    sharding = jax.typeof(param).sharding if isinstance(param, jax.Array) else None
    return sharding is not None and any(axis is not None for axis in sharding.spec)
