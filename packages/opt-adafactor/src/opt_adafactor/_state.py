"""The state of one parameter in T5X's layout, its logical axes, and what its leaves mean."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.errors import TreeMismatchError
from opt_core.extend import flatten_with_paths, json_settings, path_names

from opt_adafactor._factoring import KeptDims, Plan
from opt_adafactor._rules import HParamMap, axes_by_path, check_covers, flatten_axes

# Not `jnp.float32`, which is callable: `optax.inject_hyperparams` would take it for a schedule.
FLOAT32 = np.dtype("float32")
FIELDS = ("v_row", "v_col", "v", "m")
_NAME = "adafactor"
_ROLES: Final[dict[str, Any]] = {
    "v_row": "factored",
    "v_col": "factored",
    "v": "second_moment",
    "m": "moment",
}


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

    `params` are arrays, tracers or `jax.ShapeDtypeStruct`s.
    """
    dtypes = {**dict.fromkeys(FIELDS, FLOAT32), "m": momentum_dtype}

    def init(param: Any, kept: KeptDims) -> _AdafactorParamState:
        slots = {
            name: placeholder() if dims is None else _zeros(param, dims, dtypes[name])
            for name, dims in kept.items()
        }
        return _AdafactorParamState(**slots)

    return list(map(init, plan.treedef.flatten_up_to(params), plan.kept))


def axes_of_params(plan: Plan, params: Any, param_axes: Any) -> list[PartitionSpec | None]:
    """Returns the logical axes of every parameter, in the order of the plan."""
    try:
        matching = plan.treedef.flatten_up_to(param_axes)
    except (ValueError, TypeError, KeyError):
        axes = flatten_axes(param_axes)  # different container types, or different parameters
    else:  # in a group, `()` in the place of other groups' parameters looks like axes
        axes = axes_by_path(zip(plan.paths, matching, strict=True))
    leaves = plan.treedef.flatten_up_to(params)
    check_covers({p: np.shape(x) for p, x in zip(plan.paths, leaves, strict=True)}, axes)
    return [axes[path] for path in plan.paths]


def describe(
    plan: Plan, hyper_params: Any, params: Any, param_states: Any, dtype_momentum: Any
) -> StateDescription:
    """Returns a description of every leaf of a state; see `Adafactor.describe_state`."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(params)
    entries = plan.treedef.flatten_up_to(param_states)
    leaves = []
    for (keys, _), kept, entry in zip(keyed, plan.kept, entries, strict=True):
        param = path_names(keys)
        for names, leaf in flatten_with_paths(entry):
            dims = kept[names[-1]]
            description = LeafDescription(
                path=(*param, *names),
                group=(),
                transformation=_NAME,
                number=1,
                field=names,
                parameter=param,
                # An unused slot is a placeholder of one entry, unrelated to the parameter.
                dimensions=(None,) * np.ndim(leaf) if dims is None else dims,
                role="other" if dims is None else _ROLES[names[-1]],
                source="stated",
            )
            leaves.append(description)
    values = {**vars(hyper_params), "dtype_momentum": dtype_momentum}
    settings = json_settings({name: _setting(value) for name, value in values.items()})
    # The momentum accumulates updates that are already multiplied by the parameter scale.
    bearing = (
        {"multiply_by_parameter_scale": Bearing("refused")}
        if hyper_params.beta1 is not None
        else {}
    )
    adafactor = TransformationDescription(
        _NAME, settings=settings, bearing=bearing, source="stated"
    )
    return StateDescription(tuple(leaves), (adafactor,))


def flatten_states(plan: Plan, param_states: Any) -> list[_AdafactorParamState]:
    """Returns the state of every parameter, in the order of the plan."""
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


def check_states(plan: Plan, params: Sequence[Any], states: Sequence[_AdafactorParamState]) -> None:
    """Raises a `TreeMismatchError` unless the states have the shapes that the rules imply."""
    lines = []
    for path, param, kept, state in zip(plan.paths, params, plan.kept, states, strict=True):
        for name, dims in kept.items():
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


def _setting(value: Any) -> Any:
    """Returns a setting with the names of `FactorDim`s for `json_settings`."""
    match value:
        case HParamMap():
            return [[pattern, _setting(item)] for pattern, item in value.rules]
        case Mapping():
            return {name: _setting(item) for name, item in value.items()}
        case tuple():
            return [_setting(item) for item in value]
        case enum.Enum():
            return value.name
    return value
