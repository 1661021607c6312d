"""What the wrappers keep, and the same in float32: for evaluation, logs and other programs.

The state of the inner transformation is in `inner`, under its paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from opt_precision import _bits
from opt_precision._formats import is_encoded
from opt_precision._select import path_str
from opt_precision._weights import Weights
from opt_precision.errors import StateError


class QuantizedState(NamedTuple):
    """The state of `quantize_state`.

    Attributes:
      step: how often it was updated, for the noise; int32, a scalar.
      inner: the state of the transformation, with an `Encoded` in the place of each encoded leaf.
    """

    step: jax.Array
    inner: Any


class StochasticState(NamedTuple):
    """The state of `stochastic_weights`.

    Attributes:
      step: how often it was updated, for the noise; int32, a scalar.
      inner: the state of the transformation.
    """

    step: jax.Array
    inner: Any


def _master_params(state: Any, params: Any) -> Any:
    field, storage = state.params_storage()

    def master(param: Any, extra: Any) -> Any:
        return wide_param(param) if is_masked(extra) else storage.decode(param, extra)

    return jax.tree.map(master, params, getattr(state, field), is_leaf=is_masked)


class MasterState(NamedTuple):
    """The state of `master_weights(storage='f32')`.

    Attributes:
      master: the parameters in float32; `optax.MaskedNode()` for those that are not bfloat16.
      inner: the state of the transformation.
    """

    master: Any
    inner: Any

    def params_storage(self) -> tuple[str, Weights]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "master", Weights("f32")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _master_params(self, params)


class RemainderState(NamedTuple):
    """The state of `master_weights(storage='remainder')`.

    Attributes:
      low: the lower halves of the bits of the master, int16; the parameters are the upper halves,
        rounded.
      inner: the state of the transformation.
    """

    low: Any
    inner: Any

    def params_storage(self) -> tuple[str, Weights]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "low", Weights("remainder")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _master_params(self, params)


class Remainder8State(NamedTuple):
    """The state of `master_weights(storage='remainder8')`.

    Attributes:
      step: how often it was updated, for the noise; int32, a scalar.
      low: the third bytes of the masters, int8; the parameters are the first two, rounded.
      inner: the state of the transformation.
    """

    step: jax.Array
    low: Any
    inner: Any

    def params_storage(self) -> tuple[str, Weights]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "low", Weights("remainder8")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _master_params(self, params)


class KahanState(NamedTuple):
    """The state of `master_weights(storage='kahan')`.

    Attributes:
      step: how often it was updated, for the noise; int32, a scalar.
      compensation: what rounding took from the last updates, bfloat16.
      inner: the state of the transformation.
    """

    step: jax.Array
    compensation: Any
    inner: Any

    def params_storage(self) -> tuple[str, Weights]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "compensation", Weights("kahan")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _master_params(self, params)


def wide_param(param: Any) -> Any:
    """A parameter in float32; the mark of one that is masked stays."""
    return param if is_masked(param) else _bits.widen(jnp.asarray(param))


def is_masked(node: Any) -> bool:
    """Whether nothing is kept besides a parameter."""
    return isinstance(node, optax.MaskedNode)


STATE_OF: Final[Mapping[str, Any]] = {
    "stochastic": StochasticState,
    "f32": MasterState,
    "remainder": RemainderState,
    "remainder8": Remainder8State,
    "kahan": KahanState,
}
EXTRA_FIELD: Final[Mapping[str, str]] = {
    "f32": "master",
    "remainder": "low",
    "remainder8": "low",
    "kahan": "compensation",
}
WEIGHT_STATES: Final = tuple(STATE_OF.values())


def decode(state: Any) -> Any:
    """Returns a state with float32 arrays in the place of encoded leaves, on the device.

    Args:
      state: a state of this package, or one that holds such states.

    Raises:
      StateError: an encoded leaf is a mapping, as in what `nnx.to_pure_dict` makes of a state.

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
                f"{path_str(path)} has codes without their format, as in a pure dict of Flax. "
                "Give the state itself: of `opt_nnx.Optimizer`, that of `to_core(model)`."
            )
        return leaf

    return jax.tree_util.tree_map_with_path(
        decoded, state, is_leaf=lambda node: is_encoded(node) or _is_codes_alone(node)
    )


def _is_codes_alone(node: Any) -> bool:
    """Whether a node has the arrays of an encoded leaf; a parameter may be called `codes`, too."""
    is_apart = isinstance(node, Mapping) and set(node) in ({"codes"}, {"codes", "scale"})
    dtype = getattr(node["codes"], "dtype", None) if is_apart else None
    return dtype is not None and dtype.itemsize == 1


def master_of(state: Any, params: Any) -> Any:
    """Returns the parameters in float32, as exactly as the state knows them.

    Args:
      state: of `master_weights` or `stochastic_weights`, or of a transformation around or inside
        of which there is none: then the parameters are all that is known.
      params: the parameters.
    """
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_weight_state) if _is_weight_state(x)]
    if len(found) > 1:
        raise StateError(f"`state` holds {len(found)} states of weights; give one of them")
    if not found or isinstance(found[0], StochasticState):
        return jax.tree.map(wide_param, params)
    return found[0].master_params(params)


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

        def first(param: Any, extra: Any) -> Any:
            return extra if is_masked(extra) else storage.first_extra(jnp.asarray(param))

        kept = jax.tree.map(first, params, getattr(node, field), is_leaf=is_masked)
        return node._replace(**{field: kept})

    return jax.tree.map(reset, state, is_leaf=_is_weight_state)


def _is_weight_state(node: Any) -> bool:
    return isinstance(node, WEIGHT_STATES)
