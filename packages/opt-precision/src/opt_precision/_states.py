"""What the wrappers keep; the state of the inner transformation is in `inner`, under its paths."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedState:
    """The state of `quantize_state`.

    Attributes:
      step: how often it was updated, for the noise; int32, a scalar.
      inner: the state of the transformation, with an `Encoded` in the place of each encoded leaf.
    """

    step: jax.Array
    inner: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StochasticState:
    """The state of `stochastic_weights`.

    Attributes:
      step: how often it was updated, for the noise; int32, a scalar.
      inner: the state of the transformation.
    """

    step: jax.Array
    inner: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MasterState:
    """The state of `master_weights(storage='f32')`.

    Attributes:
      master: the parameters in float32; `optax.MaskedNode()` for those that are not bfloat16.
      inner: the state of the transformation.
    """

    master: Any
    inner: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RemainderState:
    """The state of `master_weights(storage='remainder')`.

    Attributes:
      low: the lower halves of the bits of the master, int16; the parameters are the upper halves,
        rounded.
      inner: the state of the transformation.
    """

    low: Any
    inner: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KahanState:
    """The state of `master_weights(storage='kahan')`.

    Attributes:
      compensation: what rounding took from the last updates, bfloat16.
      inner: the state of the transformation.
    """

    compensation: Any
    inner: Any


EXTRA_FIELD = {"f32": "master", "remainder": "low", "kahan": "compensation"}
EXTRA_CLASS: dict[str, Any] = {
    "f32": MasterState,
    "remainder": RemainderState,
    "kahan": KahanState,
}
WEIGHT_STATES = (StochasticState, MasterState, RemainderState, KahanState)
OUR_STATES = (QuantizedState, *WEIGHT_STATES)
