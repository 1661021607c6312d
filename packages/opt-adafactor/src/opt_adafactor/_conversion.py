"""Conversion of states between the definition and Optax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import OptimizerState
from opt_core.extend import path_names, path_str

from opt_adafactor._state import (
    FIELDS,
    _AdafactorParamState,
    by_param,
    by_slot,
    is_param_state,
    placeholder,
)
from opt_adafactor._transformation import AdafactorState, require_optax
from opt_adafactor.errors import StateConversionError


def to_optax_state(state: OptimizerState, like: Any) -> Any:
    """Returns the Optax state that continues from an `Adafactor` state.

    Args:
      state: the state of an `Adafactor` optimizer.
      like: a state returned by the `init` of the transformation for the same parameters: of
        `adafactor`, `scale_by_generalized_factored_rms` or `optax.adafactor`, alone or inside a
        chain.

    Returns:
      `like` with the statistics, momentum and count of `state`, in the dtypes of `like`. The count
      is also set in schedules of the same chain, and in an enclosing `optax.inject_hyperparams`.

    Raises:
      ImportError: Optax is not installed.
      StateConversionError: `like` does not contain exactly one Adafactor state, has no slot for the
        momentum, or belongs to different parameters.

    Examples:
      >>> import optax
      >>> from opt_adafactor import Adafactor
      >>> params = {'w': jnp.ones((3, 2))}
      >>> optimizer = Adafactor(0.1).create(params).apply_gradient(params)
      >>> state = to_optax_state(optimizer.state, optax.adafactor(0.1).init(params))
      >>> int(state[0].count), state[0].v['w'][0].tolist()
      (1, [1.0, 1.0])
    """
    optax = require_optax()
    owner, chain, average = _find(like, "like")
    states, found = jax.tree.flatten(state.param_states, is_leaf=is_param_state)
    expected: Any = jax.tree.structure(owner.v)
    if found != expected or not all(map(is_param_state, states)):
        raise StateConversionError(
            f"`state` and `like` do not belong to the same parameters:\n  `state`: {found}\n  "
            f"`like`: {expected}"
        )
    slots, count = by_slot(state.param_states), jnp.array(state.step, jnp.int32)
    holder = average if isinstance(owner, optax.FactoredState) else owner.m
    if holder is None and any(map(_is_momentum, jax.tree.leaves(slots["m"]))):
        raise StateConversionError(
            "`state` has momentum, but `like` has no slot for it: create the transformation with "
            "the same `beta1` (`momentum` in Optax)"
        )

    def is_part(node: Any) -> bool:
        if isinstance(node, optax.ScaleByScheduleState):
            return any(node is child for child in chain)
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            nodes = jax.tree.leaves(node.inner_state, is_leaf=lambda child: child is owner)
            return any(child is owner for child in nodes)
        return node is owner or (average is not None and node is average)

    def rebuild(node: Any) -> Any:
        if node is owner:
            own = {name: getattr(node, name, None) for name in FIELDS}
            filled = {n: _pour(old, slots[n], n) for n, old in own.items() if old is not None}
            return node._replace(count=count, **filled)
        if node is average:
            return node._replace(count=count, ema=_pour(node.ema, slots["m"], "m"))
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            schedules = {
                name: s._replace(count=count) if "count" in getattr(s, "_fields", ()) else s
                for name, s in node.hyperparams_states.items()
            }
            inner = jax.tree.map(rebuild, node.inner_state, is_leaf=is_part)
            return node._replace(count=count, hyperparams_states=schedules, inner_state=inner)
        return node._replace(count=count) if is_part(node) else node

    return jax.tree.map(rebuild, like, is_leaf=is_part)


def from_optax_state(state: Any) -> OptimizerState:
    """Returns the `Adafactor` state that continues from an Optax state.

    Args:
      state: the state of `adafactor`, `scale_by_generalized_factored_rms` or `optax.adafactor`,
        alone or inside a chain. An `optax.EmaState` that follows Optax's statistics in the same
        chain is interpreted as the momentum.

    Raises:
      ImportError: Optax is not installed.
      StateConversionError: `state` does not contain exactly one Adafactor state, or several moving
        averages follow it.

    Examples:
      >>> import optax
      >>> params = {'w': jnp.ones((256, 128))}
      >>> state = from_optax_state(optax.adafactor(0.1).init(params))
      >>> state.param_states['w'].v_row.shape, state.param_states['w'].m.shape
      ((128,), (1,))
    """
    owner, _, average = _find(state, "state")
    m = getattr(owner, "m", None if average is None else average.ema)

    def convert(slots: _AdafactorParamState) -> _AdafactorParamState:
        m = placeholder() if slots.m is None else jnp.array(slots.m)
        v_row, v_col, v = (jnp.array(x, jnp.float32) for x in (slots.v_row, slots.v_col, slots.v))
        return _AdafactorParamState(v_row, v_col, v, m)

    states = by_param(owner.v_row, owner.v_col, owner.v, m)
    states = jax.tree.map(convert, states, is_leaf=is_param_state)
    return OptimizerState(jnp.array(owner.count, jnp.int32), states)


def _is_momentum(m: Any) -> bool:
    """Whether a slot is not a placeholder; for a parameter of shape (1,), only its value tells."""
    if np.shape(m) != (1,):
        return True
    if isinstance(m, jax.Array) and (isinstance(m, jax.core.Tracer) or not m.is_fully_addressable):
        return False
    return bool(np.any(np.asarray(m) != 0))


def _find(state: Any, argument: str) -> tuple[Any, tuple[Any, ...], Any]:
    """Returns the Adafactor state inside an Optax state, and for Optax's own its neighbours.

    These are the states of the `optax.chain` that holds it, and the `optax.EmaState` that follows
    it there: the momentum, or `None`.
    """
    optax = require_optax()

    def is_state(node: Any) -> bool:
        return isinstance(node, AdafactorState | optax.FactoredState)

    states = [node for node in jax.tree.leaves(state, is_leaf=is_state) if is_state(node)]
    if len(states) != 1:
        raise StateConversionError(
            f"`{argument}` must contain exactly one Adafactor state, found {len(states)} in a "
            f"{type(state).__name__}. Convert the states of several groups one by one."
        )
    (owner,) = states
    if isinstance(owner, AdafactorState):
        return owner, (), None

    def is_chain(node: Any) -> bool:
        return type(node) is tuple and any(child is owner for child in node)

    nodes = jax.tree.leaves(state, is_leaf=is_chain)
    chain: tuple[Any, ...] = next(filter(is_chain, nodes), (owner,))
    place = next(i for i, child in enumerate(chain) if child is owner)
    averages = [child for child in chain[place:] if isinstance(child, optax.EmaState)]
    if len(averages) > 1:
        raise StateConversionError(
            f"`{argument}`: {len(averages)} `optax.EmaState`s follow the statistics in one chain, "
            "but at most one can be the momentum. Nest the others in a chain of their own."
        )
    return owner, chain, averages[0] if averages else None


def _pour(reference: Any, tree: Any, slot: str) -> Any:
    def pour(path: Any, old: Any, new: Any) -> jax.Array:
        if np.shape(old) != np.shape(new):
            raise StateConversionError(
                f"`{slot}` of `{path_str(path_names(path))}`: expected shape {np.shape(old)}, as "
                f"in `like`, found {np.shape(new)}. Both must use the same factoring: compare "
                "`min_dim_size_to_factor` and the factor rules."
            )
        return jnp.array(new, old.dtype)

    return jax.tree_util.tree_map_with_path(pour, reference, tree)
