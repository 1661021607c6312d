"""The state of one parameter in T5X's layout, its logical axes, and what its leaves mean."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.errors import TreeMismatchError
from opt_core.extend import flatten_with_paths, json_settings, path_names

from opt_adafactor._factoring import Factoring, Plan
from opt_adafactor._rules import HParamMap

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
    m: Any = None


def placeholder() -> jax.Array:
    """Returns the placeholder for an unused slot."""
    return jnp.zeros((1,), jnp.float32)


def is_param_state(node: Any) -> bool:
    """Whether a node is the state of one parameter."""
    return isinstance(node, _AdafactorParamState)


def by_slot(param_states: Any) -> dict[str, Any]:
    """Returns a tree like the parameters for each slot, as in states of Optax."""

    def tree(slot: str) -> Any:
        return jax.tree.map(lambda s: getattr(s, slot), param_states, is_leaf=is_param_state)

    return {slot: tree(slot) for slot in FIELDS}


def by_param(v_row: Any, v_col: Any, v: Any, m: Any) -> Any:
    """Returns a tree like the parameters of their states; `m` may be `None`."""
    trees = (v_row, v_col, v) if m is None else (v_row, v_col, v, m)
    return jax.tree.map(_AdafactorParamState, *trees)


def init_states(plan: Plan, params: Any, momentum_dtype: Any) -> list[_AdafactorParamState]:
    """Returns zeros for every parameter, sharded like the dimensions that they keep.

    `params` are arrays, tracers or `jax.ShapeDtypeStruct`s.
    """
    dtypes = {**dict.fromkeys(FIELDS, FLOAT32), "m": momentum_dtype}

    def init(param: Any, factoring: Factoring) -> _AdafactorParamState:
        slots = {
            name: placeholder() if dims is None else _zeros(param, dims, dtypes[name])
            for name, dims in factoring.kept.items()
        }
        return _AdafactorParamState(**slots)

    return list(map(init, plan.treedef.flatten_up_to(params), plan.factorings))


def describe(
    plan: Plan, hyper_params: Any, params: Any, param_states: Any, dtype_momentum: Any
) -> StateDescription:
    """Returns a description of every leaf of a state; see `Adafactor.describe_state`."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(params)
    entries = plan.treedef.flatten_up_to(param_states)
    leaves = []
    for (keys, _), factoring, entry in zip(keyed, plan.factorings, entries, strict=True):
        param = path_names(keys)
        for names, leaf in flatten_with_paths(entry):
            dims = factoring.kept[names[-1]]
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


def flatten_states(plan: Plan, params: Any, param_states: Any) -> list[_AdafactorParamState]:
    """Returns the state of every parameter, or raises unless it has the shapes of its rule."""
    try:
        states = plan.treedef.flatten_up_to(param_states)
    except ValueError as error:
        raise TreeMismatchError(
            f"`param_states` do not have the tree structure of the parameters: {error}. Create the "
            "state for these parameters, and restore into it."
        ) from None
    lines = []
    for path, factoring, param, state in zip(
        plan.paths, plan.factorings, plan.treedef.flatten_up_to(params), states, strict=True
    ):
        if not is_param_state(state):
            raise TreeMismatchError(
                f"`param_states` of `{path}`: expected an Adafactor parameter state, found a "
                f"{type(state).__name__}"
            )
        for name, dims in factoring.kept.items():
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
    return [jax.tree.map(jnp.asarray, state) for state in states]


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
