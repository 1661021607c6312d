"""States and parameters as float32: for evaluation, logs, averages and other programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from opt_precision._formats import is_encoded, is_taken_apart
from opt_precision._mirrors import path_str
from opt_precision._states import WEIGHT_STATES, is_masked, wide_param
from opt_precision._weights import Weights
from opt_precision.errors import StateError


def apply(tx: Any, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
    """Makes one step in place: returns the new parameters and state.

    Under `jit` with parameters and state donated, the temporaries are those of one block of a leaf.

    Args:
      tx: a transformation of this package, or any that has such an `apply`, or only Optax's
        `update`.
      params: the parameters.
      state: the state that belongs to them.
      grads: the gradients.
      **extra_args: for the transformation.

    Examples:
      >>> import opt_precision, optax
      >>> tx = opt_precision.quantize_state(optax.adam(0.1), opt_precision.bfloat16())
      >>> params = {'w': jnp.ones(3)}
      >>> params, state = apply(tx, params, tx.init(params), {'w': jnp.ones(3)})
      >>> params['w'].tolist()
      [0.9, 0.9, 0.9]
    """
    if hasattr(tx, "apply"):
        made: tuple[Any, Any] = tx.apply(params, state, grads, **extra_args)
        return made
    with_extra_args = optax.with_extra_args_support  # type: ignore[attr-defined]
    updates, state = with_extra_args(tx).update(grads, state, params, **extra_args)
    return apply_updates(params, updates), state


def apply_updates(params: Any, updates: Any) -> Any:
    """Adds updates to parameters in float32, and rounds once, by bits.

    What `optax.apply_updates` does, also where a compiler would take the rounding for a no-op.

    Args:
      params: the parameters.
      updates: what `update` returned; `None` leaves a parameter as it is.
    """
    nearest = Weights("nearest")

    def add(param: Any, update: Any) -> Any:
        if param is None or update is None:
            return param
        return nearest.place(jnp.asarray(param), None, jnp.asarray(update), None)[0]

    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def decode(state: Any) -> Any:
    """Returns a state with float32 arrays in the place of encoded leaves, on the device.

    Args:
      state: a state of this package, or one that holds such states.

    Raises:
      StateError: an encoded leaf is two arrays, as in `flax.nnx.Optimizer` after its first update.

    Examples:
      >>> import opt_precision, optax
      >>> tx = opt_precision.quantize_state(optax.adam(0.1), opt_precision.dynamic8())
      >>> state = tx.init({'w': jnp.ones((16, 256))})
      >>> type(state.inner[0].mu['w']).__name__, decode(state).inner[0].mu['w'].dtype.name
      ('Encoded', 'float32')
    """

    def decoded(path: Any, leaf: Any) -> Any:
        if is_encoded(leaf):
            return leaf.leaf_storage().decode(*jax.tree.leaves(leaf))
        if _is_codes_alone(leaf):
            raise StateError(
                f"{path_str(path)} has codes without their format: `flax.nnx.Optimizer` took the "
                "leaf apart. Train with `opt_nnx.Optimizer`, which keeps it whole."
            )
        return leaf

    return jax.tree_util.tree_map_with_path(
        decoded, state, is_leaf=lambda node: is_encoded(node) or _is_codes_alone(node)
    )


def _is_codes_alone(node: Any) -> bool:
    """Whether a node has the arrays of an encoded leaf; a parameter may be called `codes`, too."""
    dtype = getattr(node["codes"], "dtype", None) if is_taken_apart(node) else None
    return dtype is not None and dtype.itemsize == 1


def master_of(state: Any, params: Any) -> Any:
    """Returns the parameters in float32, as exactly as the state knows them.

    Args:
      state: of `master_weights` or `stochastic_weights`, or of a transformation around or inside
        of which there is none: then the parameters are all that is known.
      params: the parameters.
    """
    found = _weight_state(state)
    if found is None:
        return jax.tree.map(wide_param, params)
    return found.master_params(params)


def set_params(state: Any, params: Any) -> Any:
    """Returns the state for parameters that were set from outside: loaded, averaged, edited.

    What was kept besides the old parameters is reset: the master is the new parameters.

    Args:
      state: of `master_weights`, or one that holds such a state.
      params: the new parameters.

    Examples:
      >>> import opt_precision, optax
      >>> tx = opt_precision.master_weights(optax.sgd(0.1), storage='remainder')
      >>> params = {'w': jnp.ones(2, jnp.bfloat16)}
      >>> _, state = tx.apply(params, tx.init(params), {'w': jnp.full(2, 0.003)})
      >>> set_params(state, params).low['w'].tolist()
      [0, 0]
    """

    def reset(node: Any) -> Any:
        if not hasattr(node, "params_storage"):
            return node
        field, storage = node.params_storage()
        kept = getattr(node, field)
        if storage.name == "f32":
            kept = jax.tree.map(
                lambda p, m: m if is_masked(m) else wide_param(p), params, kept, is_leaf=is_masked
            )
        else:
            kept = jax.tree.map(jnp.zeros_like, kept)
        return node._replace(**{field: kept})

    return jax.tree.map(reset, state, is_leaf=_is_weight_state)


def _is_weight_state(node: Any) -> bool:
    return isinstance(node, WEIGHT_STATES)


def _weight_state(state: Any) -> Any:
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_weight_state) if _is_weight_state(x)]
    if len(found) > 1:
        raise StateError(f"`state` holds {len(found)} states of weights; give one of them")
    return found[0] if found else None
