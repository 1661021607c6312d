"""How parameters of 16 bits take updates that are smaller than what they can hold."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, TypeAlias

import jax
import jax.numpy as jnp

from opt_precision import _bits

Storage: TypeAlias = Literal["f32", "remainder", "remainder8", "kahan"]
Method: TypeAlias = Literal["nearest", "stochastic"] | Storage

EXTRA_DTYPE: Final = {
    "f32": jnp.float32,
    "remainder": jnp.int16,
    "remainder8": jnp.int8,
    "kahan": jnp.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class Weights:
    """How parameters are rounded."""

    method: Method  # nearest, stochastic, or with what is kept besides them
    seed: int = 0  # of the noise

    def is_met_by(self, dtype: object) -> bool:
        """Whether parameters of this dtype need it: others are not rounded, or not here."""
        return self.method != "nearest" and dtype == jnp.bfloat16

    @property
    def needs_noise(self) -> bool:
        """Whether a step rounds at random: parameters, or what is kept besides them."""
        return self.method in ("stochastic", "remainder8", "kahan")

    def first_extra(self, param: jax.Array) -> jax.Array:
        """What is kept besides a parameter at first; the master is the parameter itself."""
        if self.method == "f32":
            return _bits.widen(param)
        return jnp.zeros_like(param, dtype=EXTRA_DTYPE[self.method])

    def value(self, param: jax.Array, extra: jax.Array | None) -> jax.Array:
        """The parameter in float32, as the transformation is to see it."""
        if self.method == "f32" and extra is not None:
            return extra
        if self.method in ("remainder", "remainder8") and extra is not None:
            return _bits.join(param, extra)
        return _bits.widen(param)

    def place(
        self,
        param: jax.Array,
        extra: jax.Array | None,
        update: jax.Array,
        noise: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns the parameter with an update added to it, and what is kept besides it."""
        if self.method == "kahan" and extra is not None and noise is not None:
            return _with_compensation(param, extra, update, noise)
        if extra is not None:
            master = self.value(param, extra) + update.astype(jnp.float32)
            if self.method == "remainder8":
                return _bits.split_byte(master, noise)
            visible, low = _bits.split(master)
            return visible, low if self.method == "remainder" else master
        total = _bits.widen(param) + update
        if param.dtype != jnp.bfloat16:
            return total.astype(param.dtype), None
        total = total.astype(jnp.float32)
        rounded = (
            _bits.round_nearest(total) if noise is None else _bits.round_stochastic(total, noise)
        )
        return _bits.narrow(rounded), None


def _with_compensation(
    param: jax.Array, compensation: jax.Array, update: jax.Array, noise: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Kahan's: what rounding took from one update is added to the next. The order is essential.

    To nearest the compensation would not take up what is less than half its own last digit: with
    updates of 1e-6 a weight of 1 stands still for ever. So it is rounded stochastically.
    """
    wide = _bits.widen(param)
    wanted = update.astype(jnp.float32) + _bits.widen(compensation)
    rounded = _bits.round_nearest(wide + wanted)
    left = jnp.where(jnp.isfinite(rounded), wanted - (rounded - wide), 0)
    left = _bits.round_stochastic(left, noise)
    return _bits.narrow(rounded), _bits.narrow(left)
