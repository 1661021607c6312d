"""What a user chooses: one codec for first and second moments, each by its own rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import jax.numpy as jnp

from opt_precision._formats import Format, block_axis, block_size
from opt_precision.errors import PrecisionError

Role: TypeAlias = Literal["moment", "slow_moment", "second_moment"]
ROLES: Final = frozenset(get_args(Role))
Rounding: TypeAlias = Literal["nearest", "stochastic"]


@dataclasses.dataclass(frozen=True)
class Codec:
    """How leaves of a state are stored; made by `bfloat16()`, `dynamic8()` and their like.

    Attributes:
      name: of the codec.
      m: how first moments are rounded.
      v: how second moments are rounded.
      block: how many elements share a scale, if they divide the axis.
      min_size: leaves with fewer elements stay as they are.
    """

    name: str
    m: Rounding = "nearest"
    v: Rounding = "stochastic"
    block: int = 0
    min_size: int = 1

    def __post_init__(self) -> None:
        for name in ("m", "v"):
            if getattr(self, name) not in ("nearest", "stochastic"):
                raise PrecisionError(
                    f"`{name}` must be 'nearest' or 'stochastic', found {getattr(self, name)!r}"
                )
        if self.block < 0 or self.min_size < 1:
            raise PrecisionError(
                f"`block` and `min_size` must be positive, found {self.block} and {self.min_size}"
            )

    def __str__(self) -> str:
        usual = _CODECS.get(self.name, identity)()
        settings = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)[1:]
            if (value := getattr(self, field.name)) != getattr(usual, field.name)
        ]
        return f"{self.name}({', '.join(settings)})" if settings else self.name

    def form(self, role: Role, shape: Sequence[int], dtype: Any) -> Format | str:
        """The format of a leaf, or why it stays as it is; its global shape alone decides."""
        size, bits = math.prod(shape), jnp.finfo(dtype).bits
        if self.name == "identity":
            return "identity"
        if not shape:
            return "a scalar"
        if size < self.min_size:
            return f"fewer than {self.min_size} elements"
        if self.name == "bfloat16" and bits <= 16:
            return f"{jnp.dtype(dtype).name} already"
        if bits > 32:
            return f"{jnp.dtype(dtype).name} is not stored in fewer bits"
        squared = role == "second_moment"
        rounding = self.v if squared else self.m
        # Slow averages move by less than a code in a step: rounded to nearest they would not.
        stochastic = role == "slow_moment" or rounding == "stochastic"
        axis = block = 0
        if self.block:
            axis = block_axis(shape)
            block = block_size(shape[axis], self.block)
        kind: Any = "dynamic8" if self.name == "log8" and not squared else self.name
        return Format(kind, squared, stochastic, axis, block, jnp.dtype(dtype).name)


def bfloat16(*, m: Rounding = "nearest", v: Rounding = "stochastic") -> Codec:
    """bfloat16: 2 bytes per element.

    Args:
      m: how first moments are rounded.
      v: how second moments are rounded. `'nearest'` never comes down again unless
        `1 - b2` is at least 0.01.
    """
    return Codec("bfloat16", m, v)


def float8(*, block: int = 256, min_size: int = 4096) -> Codec:
    """float8_e4m3fn with a scale per block: 1 + 4 / `block` bytes per element.

    Second moments are stored by their square roots, without a zero. Three bits of mantissa: coarser
    than `dynamic8` for the large elements of a block, finer for the small ones.

    Args:
      block: how many elements along one axis share a scale.
      min_size: leaves with fewer elements stay as they are.
    """
    return Codec("float8", block=_checked(block), min_size=min_size)


def dynamic8(
    *, block: int = 256, min_size: int = 4096, m: Rounding = "nearest", v: Rounding = "stochastic"
) -> Codec:
    """The dynamic 8-bit map of bitsandbytes, made safe: 1 + 4 / `block` bytes per element.

    Second moments are stored by their square roots, in a map without a zero, and rounded
    stochastically such that the mean of `v` is kept.

    Args:
      block: how many elements along one axis share a scale.
      min_size: leaves with fewer elements stay as they are.
      m: how first moments are rounded. To nearest updates keep their direction best, and what falls
        is never rounded back to what it was; with a decay beyond 0.95 they lose it in 8 bits, so
        take `{'moment': bfloat16(), 'second_moment': dynamic8()}`.
      v: how second moments are rounded. `'nearest'` is what other libraries do, and is here to be
        compared with: such a moment never comes down again.
    """
    return Codec("dynamic8", m, v, _checked(block), min_size)


def log8(*, block: int = 256, min_size: int = 4096) -> Codec:
    """Second moments in even steps of the logarithm, computed without a table of values.

    First moments are stored as by `dynamic8`. A step is 6.5 % of `sqrt(v)` everywhere.

    Args:
      block: how many elements along one axis share a scale.
      min_size: leaves with fewer elements stay as they are.
    """
    return Codec("log8", block=_checked(block), min_size=min_size)


def identity() -> Codec:
    """Leaves as they are: for tests, and to see what the wrapper itself does."""
    return Codec("identity")


Codecs: TypeAlias = Codec | Mapping[Role, Codec]  # one for all roles, or one for each

_CODECS = {make.__name__: make for make in (bfloat16, dynamic8, float8, identity, log8)}


def _checked(block: Any) -> int:
    if not isinstance(block, int) or not 16 <= block <= 4096:
        raise PrecisionError(f"`block` must be an integer between 16 and 4096, found {block!r}")
    return block
