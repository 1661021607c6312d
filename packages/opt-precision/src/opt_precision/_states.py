"""What the wrappers keep; the state of the inner transformation is in `inner`, under its paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from opt_precision import _bits
from opt_precision._storage import ParamsStorage


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

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return jax.tree.map(wide_param, params)


class MasterState(NamedTuple):
    """The state of `master_weights(storage='f32')`.

    Attributes:
      master: the parameters in float32; `optax.MaskedNode()` for those that are not bfloat16.
      inner: the state of the transformation.
    """

    master: Any
    inner: Any

    def params_storage(self) -> tuple[str, ParamsStorage]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "master", ParamsStorage("f32")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _masters(self, params)


class RemainderState(NamedTuple):
    """The state of `master_weights(storage='remainder')`.

    Attributes:
      low: the lower halves of the bits of the master, int16; the parameters are the upper halves,
        rounded.
      inner: the state of the transformation.
    """

    low: Any
    inner: Any

    def params_storage(self) -> tuple[str, ParamsStorage]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "low", ParamsStorage("remainder")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _masters(self, params)


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

    def params_storage(self) -> tuple[str, ParamsStorage]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "low", ParamsStorage("remainder8")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _masters(self, params)


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

    def params_storage(self) -> tuple[str, ParamsStorage]:
        """Returns what is kept in which field, as `opt_core.protocols.StoresParams` asks."""
        return "compensation", ParamsStorage("kahan")

    def master_params(self, params: Any) -> Any:
        """Returns the parameters in float32, as exactly as they are known."""
        return _masters(self, params)


def _masters(state: Any, params: Any) -> Any:
    """The parameters in float32, from what a state keeps besides them."""
    field, storage = state.params_storage()

    def of(param: Any, extra: Any) -> Any:
        return wide_param(param) if is_masked(extra) else storage.decode(param, extra)

    return jax.tree.map(of, params, getattr(state, field), is_leaf=is_masked)


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
