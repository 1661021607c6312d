"""The wrappers of this package as one value, to give to a definition or a group of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

from opt_precision._codecs import Codec, Role
from opt_precision._select import Select
from opt_precision._weights import Storage
from opt_precision._wrappers import (
    CHUNK_BYTES,
    checked_codec,
    master_weights,
    offload_state,
    quantize_state,
    stochastic_weights,
)
from opt_precision.errors import PrecisionError

Rounding: TypeAlias = Literal["stochastic"] | Storage
_ROUNDINGS: Final = ("stochastic", *get_args(Storage))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """How parameters and state are stored; calling it wraps a transformation.

    A value: two that are made alike are equal, and `str` is short enough for a table.

    Attributes:
      weights: `'stochastic'` for `stochastic_weights`, `'f32'`, `'remainder'` or `'kahan'` for
        `master_weights`; `None` leaves parameters to Optax.
      state: the codec of moments, or one for each role; `None` leaves the state as it is.
      select: which leaves are moments, see `quantize_state`.
      offload: whether moments lie in the memory of the host, by `offload_state`.
      seed: of the noise of both.
      chunk_bytes: see `quantize_state`.
      layout: see `quantize_state`; of the parameters that the transformation is given.

    Raises:
      PrecisionError: `weights` is none of these, or there is nothing to be done.
      TypeError: `state` is no codec.

    Examples:
      >>> import optax
      >>> from opt_precision import dynamic8
      >>> precision = Precision(weights='stochastic', state=dynamic8())
      >>> print(precision)
      stochastic weights, dynamic8 state
      >>> tx = precision(optax.adamw(1e-3))
    """

    weights: Rounding | None = None
    # No mapping can be hashed, nor a layout.
    state: Codec | Mapping[Role, Codec] | None = dataclasses.field(default=None, hash=False)
    select: Select | None = None
    offload: bool = False
    seed: int = 0
    chunk_bytes: int = CHUNK_BYTES
    layout: Any = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.weights not in (None, *_ROUNDINGS):
            raise PrecisionError(f"`weights` must be one of {_ROUNDINGS}, found {self.weights!r}")
        if self.state is not None:
            checked_codec(self.state)
        elif not self.offload:
            if self.weights is None:
                raise PrecisionError(
                    "give `weights`, `state` or `offload`; without them nothing changes"
                )
            if self.select is not None or self.layout is not None:
                raise PrecisionError("`select` and `layout` are about moments; give `state`")

    def __call__(self, tx: Any) -> Any:
        """Returns a transformation, wrapped.

        Args:
          tx: an Optax transformation.
        """
        given: Any = {"chunk_bytes": self.chunk_bytes, "layout": self.layout}
        if self.offload:
            tx = offload_state(tx, self.select, **given)
        if self.state is not None:
            tx = quantize_state(tx, self.state, self.select, seed=self.seed, **given)
        if self.weights == "stochastic":
            return stochastic_weights(tx, seed=self.seed)
        if self.weights is None:
            return tx
        return master_weights(tx, storage=self.weights, seed=self.seed)

    def __str__(self) -> str:
        parts = [f"{self.weights} weights"] if self.weights else []
        if isinstance(self.state, Codec):
            parts.append(f"{self.state} state")
        elif self.state is not None:
            parts += [f"{codec} {role}" for role, codec in sorted(self.state.items())]
        if self.offload:
            parts.append("moments on the host")
        if self.seed:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)
