"""How parameters are stored: how they are rounded, and what is kept besides them.

`Weights` has the methods that `opt_core.protocols.Storage` asks for, as `Format` has for leaves of
a state; opt-core is not imported.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp

from opt_precision import _bits
from opt_precision._formats import PACKAGE, VERSION, Format
from opt_precision.errors import StateError

Storage: TypeAlias = Literal["f32", "remainder", "remainder8", "kahan"]
Method: TypeAlias = Literal["nearest", "stochastic"] | Storage

EXTRA_DTYPE: Final[Mapping[Method, Any]] = {
    "f32": jnp.float32,
    "remainder": jnp.int16,
    "remainder8": jnp.int8,
    "kahan": jnp.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class Weights:
    """How parameters are rounded, and what is kept besides those in bfloat16.

    Attributes:
      method: `'nearest'`, `'stochastic'`, or what is kept. `'f32'`: the parameter in float32.
        `'remainder'`: the lower half of the bits of that, int16, where the parameter is the upper
        half, rounded half away from zero. `'remainder8'`: the upper byte of that, int8.
        `'kahan'`: what is to be added to the parameter, bfloat16.
      seed: of the noise; 0 in what a state says of its arrays, whose meaning has none.
    """

    method: Method
    seed: int = 0
    dtype: str = dataclasses.field(default="float32", init=False)
    fields: tuple[str, ...] = dataclasses.field(default=(), init=False)

    @property
    def name(self) -> str:
        """The method, as plans call it."""
        return self.method

    @property
    def is_exact(self) -> bool:
        """Whether all digits of a float32 are kept."""
        return self.method in ("f32", "remainder")

    def __str__(self) -> str:
        return self.method

    def to_data(self) -> dict[str, Any]:
        """Returns what `read_storage` reads."""
        return {"package": PACKAGE, "of": "params", "name": self.method, "version": VERSION}

    def decode(self, *arrays: jax.Array) -> jax.Array:
        """Returns a parameter in float32, from itself and what is kept besides it."""
        master: jax.Array = _joined(self, *arrays)
        return master

    def encode(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns a parameter of float32 as bfloat16, and what is kept besides it."""
        arrays: tuple[jax.Array, jax.Array] = _split(self.method, values, None)
        return arrays

    def is_met_by(self, dtype: object) -> bool:
        """Whether parameters of this dtype need it: others are not rounded, or not here."""
        return self.method != "nearest" and dtype == jnp.bfloat16

    @property
    def constructor(self) -> str:
        """The name of the function that makes them."""
        return "stochastic_weights" if self.method == "stochastic" else "master_weights"

    @property
    def keeps(self) -> bool:
        """Whether something is kept besides parameters in bfloat16."""
        return self.method in EXTRA_DTYPE

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
            return _split_master(self.method, master, noise)
        total = _bits.widen(param) + update
        if param.dtype != jnp.bfloat16:
            return total.astype(param.dtype), None
        total = total.astype(jnp.float32)
        rounded = (
            _bits.round_nearest(total) if noise is None else _bits.round_stochastic(total, noise)
        )
        return _bits.narrow(rounded), None


NEAREST: Final = Weights("nearest")


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


def _split_master(
    method: Method, master: jax.Array, noise: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """A parameter in float32 as bfloat16, and what is kept besides it."""
    if method == "kahan":
        nearest = _bits.round_nearest(master)
        return _bits.narrow(nearest), _bits.narrow(_bits.round_nearest(master - nearest))
    if method == "remainder8":
        return _bits.split_byte(master, noise)
    visible, low = _bits.split(master)
    return visible, master if method == "f32" else low


_split = jax.jit(_split_master, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _joined(weights: Weights, param: jax.Array, extra: jax.Array) -> jax.Array:
    value = weights.value(param, extra)
    return value + _bits.widen(extra) if weights.method == "kahan" else value


def read_storage(data: Mapping[str, Any]) -> Format | Weights:
    """Returns a storage from its data, as a checkpoint has it; opt-core calls this on a restore.

    Args:
      data: what `to_data` of a storage returned.

    Returns:
      An `opt_core.protocols.Storage`, which decodes and encodes.

    Raises:
      StateError: another release wrote it, with codes of another meaning.
    """
    if data.get("version") != VERSION:
        raise StateError(f"found version {data.get('version')!r}, this release knows {VERSION}")
    fields = {name: value for name, value in data.items() if name not in ("package", "of")}
    if data["of"] == "leaf":
        return Format(**fields)
    return Weights(fields["name"])
