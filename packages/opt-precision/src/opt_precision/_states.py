"""The state, and the same in float32: for evaluation, logs and other programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp

from opt_precision import _bits
from opt_precision._formats import is_encoded
from opt_precision._select import path_str
from opt_precision._weights import EXTRA_DTYPE, Method, Weights
from opt_precision.errors import StateError


class PrecisionState(NamedTuple):
    """The state of every transformation of this package.

    Attributes:
      step: how often it was updated, for the noise; int32, a scalar.
      kept: what `master_weights` keeps besides each bfloat16 parameter, and `optax.MaskedNode()`
        for every other; for `stochastic_weights` that alone, and `None` if parameters are left to
        Optax.
      inner: the state of the transformation, under Optax's paths, with an `Encoded` in the place
        of each encoded leaf.
    """

    step: jax.Array
    kept: Any
    inner: Any

    @property
    def weights(self) -> Weights:
        """How parameters are stored, as far as what is kept shows it."""
        dtypes = (str(getattr(leaf, "dtype", "")) for leaf in jax.tree.leaves(self.kept))
        method: Method = "nearest" if self.kept is None else "stochastic"
        return Weights(_METHOD_OF.get(next(dtypes, ""), method))

    def params_storage(self) -> tuple[str, Weights]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "kept", self.weights

    def master_params(self, params: Any) -> Any:
        """Returns the parameters as exactly as they are known; those of others as they are."""
        weights = self.weights

        def master(path: Any, extra: Any, param: Any) -> Any:
            if is_masked(extra):
                return param
            if jnp.result_type(param) != jnp.bfloat16:
                raise StateError(
                    f"{path_str(path)} is {jnp.result_type(param).name}, and the state keeps what "
                    "rounding took from a parameter in bfloat16. Give the parameters of the state."
                )
            return weights.decode(param, extra)

        if not weights.keeps:
            return params
        return jax.tree_util.tree_map_with_path(master, self.kept, params, is_leaf=is_masked)


_METHOD_OF: Final = {jnp.dtype(dtype).name: method for method, dtype in EXTRA_DTYPE.items()}


def is_masked(node: Any) -> bool:
    """Whether nothing is kept besides a parameter: a `MaskedNode`, or `()` as opt-core has."""
    return isinstance(node, tuple) and not node


def is_state(node: Any) -> TypeGuard[PrecisionState]:
    """Whether a node is a state of this package."""
    return isinstance(node, PrecisionState)


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
      state: of any transformation: it may hold several states, each of some of the parameters, as
        in `optax.partition`, or none: then the parameters are all that is known.
      params: the parameters.

    Raises:
      StateError: a parameter is not in bfloat16, of which the state keeps more digits.
    """
    for node in jax.tree.leaves(state, is_leaf=is_state):
        if is_state(node):
            params = node.master_params(params)
    return jax.tree.map(lambda param: _bits.widen(jnp.asarray(param)), params)


def set_params(state: Any, params: Any) -> Any:
    """Returns the state for parameters that were set from outside: loaded, averaged, edited.

    What was kept besides the old parameters is reset: the master is the new parameters.

    Args:
      state: of `master_weights`, or one that holds such states.
      params: the new parameters.

    Examples:
      >>> import opt_precision, optax
      >>> tx = opt_precision.master_weights(optax.sgd(0.1), storage='remainder')
      >>> params = {'w': jnp.ones(2, jnp.bfloat16)}
      >>> _, state = tx.apply(params, tx.init(params), {'w': jnp.full(2, 0.003)})
      >>> set_params(state, params).kept['w'].tolist()
      [0, 0]
    """

    def first(node: Any) -> Any:
        if not is_state(node) or not (weights := node.weights).keeps:
            return node

        def reset(extra: Any, param: Any) -> Any:
            return extra if is_masked(extra) else weights.first_extra(jnp.asarray(param))

        kept = jax.tree.map(reset, node.kept, params, is_leaf=is_masked)
        return node._replace(kept=kept)

    return jax.tree.map(first, state, is_leaf=is_state)
