"""The state of one parameter, in T5X's layout and without its placeholders."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from opt_adafactor._factoring import Factoring

# Not `jnp.float32`, which is callable: `optax.inject_hyperparams` would take it for a schedule.
FLOAT32 = np.dtype("float32")


class _AdafactorParamState(flax.struct.PyTreeNode):
    """The state of one parameter in T5X's layout; unused slots are float32 zeros of shape (1,).

    Attributes:
      v_row: float32; the parameter's shape without the column dimensions.
      v_col: float32; the parameter's shape without the row dimensions.
      v: float32; the parameter's shape; used if it is not factored.
      m: momentum; the parameter's shape.
    """

    v_row: Any
    v_col: Any
    v: Any
    m: Any


class Slots(NamedTuple):
    """The state of one parameter with `None` for unused slots."""

    v_row: Any
    v_col: Any
    v: Any
    m: Any


def init_slots(param: Any, factoring: Factoring, momentum_dtype: Any) -> Slots:
    """Returns zero slots for one parameter, with its sharding in the dimensions that they keep.

    Args:
      param: array, tracer or `jax.ShapeDtypeStruct`.
      factoring: the factoring of the parameter.
      momentum_dtype: dtype of `m`; `None` for no momentum.
    """
    everything = tuple(range(factoring.rank))
    m = None if momentum_dtype is None else _zeros(param, everything, momentum_dtype)
    if not factoring.is_factored:
        return Slots(None, None, _zeros(param, everything, jnp.float32), m)
    v_row = _zeros(param, factoring.row_dims, jnp.float32)
    v_col = _zeros(param, factoring.col_dims, jnp.float32)
    return Slots(v_row, v_col, None, m)


def used_slots(state: Any, factoring: Factoring, *, has_momentum: bool) -> Slots:
    """Returns the slots of a T5X state, with `None` for placeholders."""
    m = state.m if has_momentum else None
    if factoring.is_factored:
        return Slots(state.v_row, state.v_col, None, m)
    return Slots(None, None, state.v, m)


def slot_shapes(shape: tuple[int, ...], factoring: Factoring) -> Slots:
    """Returns the shapes of the slots, including that of `m`."""
    if not factoring.is_factored:
        return Slots(None, None, shape, shape)
    v_row = tuple(shape[dim] for dim in factoring.row_dims)
    v_col = tuple(shape[dim] for dim in factoring.col_dims)
    return Slots(v_row, v_col, None, shape)


def placeholder() -> jax.Array:
    """Returns the placeholder for an unused slot."""
    return jnp.zeros((1,), jnp.float32)


def with_placeholders(slots: Slots) -> Slots:
    """Returns the slots with placeholders for unused ones."""
    return Slots(*(placeholder() if slot is None else slot for slot in slots))


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
