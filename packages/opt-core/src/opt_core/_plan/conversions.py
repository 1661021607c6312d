"""How the values of a leaf are made from leaves of the source, and how both are sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Spec = list[Any]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A way to make a leaf.

    Attributes:
      word: what `Row.kinds` has for it.
    """

    word: str

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        """Returns the leaf, of that shape."""
        raise NotImplementedError

    def source_spec(self, spec: Spec) -> Spec:
        """Returns how to shard a source for a leaf with a spec."""
        return spec

    def leaf_spec(self, spec: Spec) -> Spec:
        """Returns how the leaf is sharded if a source has a spec, as far as that has entries."""
        return spec


@dataclasses.dataclass(frozen=True)
class Stacked(Conversion):
    """The sources along a new axis."""

    axis: int

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        return jnp.stack(sources, self.axis)

    def source_spec(self, spec: Spec) -> Spec:
        return _without(spec, self.axis)

    def leaf_spec(self, spec: Spec) -> Spec:
        return _with(spec, self.axis)


@dataclasses.dataclass(frozen=True)
class Sliced(Conversion):
    """One entry along an axis of the source."""

    axis: int
    index: int

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        return jax.lax.index_in_dim(sources[0], self.index, self.axis, keepdims=False)

    def source_spec(self, spec: Spec) -> Spec:
        return _with(spec, self.axis)

    def leaf_spec(self, spec: Spec) -> Spec:
        return _without(spec, self.axis)

    def __str__(self) -> str:
        return f"[{', '.join([*[':'] * self.axis, str(self.index)])}]"


@dataclasses.dataclass(frozen=True)
class Padded(Conversion):
    """The source with more entries along an axis: a value, or in a state those of `init`."""

    axis: int
    value: float | complex

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        (old,) = sources
        new = list(old.shape)
        new[self.axis] = shape[self.axis] - old.shape[self.axis]
        return jnp.concatenate([old, jnp.full(new, self.value, old.dtype)], self.axis)

    def source_spec(self, spec: Spec) -> Spec:
        return _with(_without(spec, self.axis), self.axis)


@dataclasses.dataclass(frozen=True)
class Mapped(Conversion):
    """What a function makes of the sources.

    Attributes:
      fn: takes them one by one.
      is_alike: whether its result is sharded as they are, as far as that divides.
      is_opaque: whether it needs values, so nothing is known of its result.
    """

    fn: Callable[..., Any]
    is_alike: bool = True
    is_opaque: bool = False

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        return self.fn(*sources)

    def source_spec(self, spec: Spec) -> Spec:
        return spec if self.is_alike else []

    def leaf_spec(self, spec: Spec) -> Spec:
        return spec if self.is_alike else []


def _with(spec: Spec, axis: int) -> Spec:
    return [*spec[:axis], None, *spec[axis:]]


def _without(spec: Spec, axis: int) -> Spec:
    return [*spec[:axis], *spec[axis + 1 :]]
