"""What is computed on a block of a leaf: its new values, or sums over its elements."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

from opt_precision import _bits
from opt_precision._formats import Format, decode, encode
from opt_precision._stream import Piece, Shape
from opt_precision._weights import Weights

# Where a value that equations start from comes from: an index is that of a leaf of the state that
# mirrors the parameter.
GRADIENT: Final = -1
PARAMETER: Final = -2
NUMBER: Final = -3


class Numbers(NamedTuple):
    """What the computation of a leaf needs besides its blocks."""

    values: Sequence[Any]  # in the order in which the equations take them
    keys: jax.Array | None = None  # of all noise of the step; `None` where nothing is rounded
    # Where the leaf's are among them: of the parameter, and of each leaf of the state that mirrors
    # it.
    first: np.uint32 = np.uint32(0)
    # Where this device's part of the leaf begins; empty where it has all of it.
    begin: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """The equations of a leaf, and what they start from."""

    jaxpr: Jaxpr | None  # the equations; `None` where what they make are operands
    # Where the arguments come from: `GRADIENT`, `PARAMETER`, `NUMBER` or an index.
    sources: Sequence[int]
    # How each leaf of the state that is read is stored; `None` as it is.
    formats: Sequence[Format | None]
    weights: Weights  # how parameters are rounded
    has_params: bool  # whether there are parameters, or gradients alone
    has_extra: bool  # whether something is kept besides the parameter

    @property
    def key(self) -> Hashable:
        """Equal for leaves whose equations differ in the names of their values alone."""
        flags = self.weights, self.has_params, self.has_extra
        return str(self.jaxpr), tuple(self.sources), tuple(self.formats), flags

    def values(
        self,
        operands: Iterator[jax.Array],
        numbers: Sequence[Any],
        param: jax.Array | None,
        extra: jax.Array | None,
    ) -> tuple[list[Any], list[jax.Array]]:
        """Returns what the equations make of a block, and the leaves of the state as stored."""
        known: dict[int, Any] = {}
        if GRADIENT in self.sources:
            known[GRADIENT] = _bits.widen(next(operands))
        if param is not None:
            known[PARAMETER] = self.weights.value(param, extra)
        stored = []
        for place, form in enumerate(self.formats):
            codes = next(operands)
            stored.append(codes)
            if form is not None:
                codes = decode(form, codes, next(operands) if form.block else None)
            known[place] = codes
        if self.jaxpr is None:
            return list(operands), stored
        left = iter(numbers)
        given = [next(left) if source == NUMBER else known[source] for source in self.sources]
        return jax.core.eval_jaxpr(self.jaxpr, (), *given), stored


@dataclasses.dataclass(frozen=True, eq=False)
class NewValues:
    """How a block of a leaf becomes that of its new values."""

    inputs: Inputs  # what they are made of: the update, and each leaf of the state
    is_in_place: bool  # whether the new parameter is wanted, and not the update
    strides: tuple[int, ...]  # of the whole leaf, in elements

    @property
    def key(self) -> Hashable:
        """Equal for leaves whose computations differ in numbers alone."""
        return self.inputs.key, self.is_in_place, self.strides

    def __call__(
        self, numbers: Numbers, piece: Piece, operands: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Computes a block."""
        left = iter(operands)
        buffer = next(left)
        param = buffer
        if not self.is_in_place:
            param = next(left) if self.inputs.has_params else None  # type: ignore[assignment]
        extra = next(left) if self.inputs.has_extra else None
        begin = numbers.begin or (0,) * len(piece.shape)
        origin = [first + more for first, more in zip(begin, piece.origin, strict=True)]
        index = functools.cache(lambda: _bits.global_index(piece.shape, origin, self.strides))

        def noise(place: int) -> jax.Array:
            assert numbers.keys is not None
            key = lax.dynamic_index_in_dim(
                numbers.keys, numbers.first + np.uint32(place), keepdims=False
            )
            return _bits.noise_at(key, index())

        outs, stored = self.inputs.values(left, numbers.values, param, extra)
        update, *states = outs
        results = self._placed(param, extra, update, noise, buffer)
        rows = zip(self.inputs.formats, stored, states, strict=True)
        for place, (form, old, new) in enumerate(rows, 1):
            results += _stored(form, old, new, functools.partial(noise, place))
        return results

    def _placed(
        self,
        param: jax.Array | None,
        extra: jax.Array | None,
        update: jax.Array,
        noise: Callable[[int], jax.Array],
        buffer: jax.Array,
    ) -> list[jax.Array]:
        """The new parameter, or the update that makes it, and what is kept besides it."""
        weights = self.inputs.weights
        if param is None or (not self.is_in_place and weights.method == "nearest"):
            return [update.astype(buffer.dtype)]
        is_met = weights.is_met_by(param.dtype)
        is_random = is_met and weights.needs_noise
        new, kept = weights.place(param, extra, update, noise(0) if is_random else None)
        if not self.is_in_place:
            if is_met:
                update = _bits.widen(new) - _bits.widen(param)
            new = update.astype(buffer.dtype)
        return [new] if kept is None else [new, kept]


def _stored(
    form: Format | None, old: jax.Array, new: jax.Array, noise: Callable[[], jax.Array]
) -> list[jax.Array]:
    """A leaf of the state as it is stored."""
    if form is None:
        return [new.astype(old.dtype)]
    codes, scale = encode(form, new, noise() if form.needs_noise else None, old)
    return [codes] if scale is None else [codes, scale]


# What makes one number of a block, what joins it to that of the blocks before, and to other
# devices'.
REDUCTIONS: Final[Mapping[str, tuple[Any, Any, Any]]] = {
    "reduce_max": (jnp.max, lax.max, lax.pmax),
    "reduce_min": (jnp.min, lax.min, lax.pmin),
    "reduce_sum": (jnp.sum, lax.add, lax.psum),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Totals:
    """How the blocks of a leaf become numbers, each with those of the blocks before."""

    inputs: Inputs  # what they are made of
    names: Sequence[str]  # for each number the primitive that makes it

    @property
    def key(self) -> Hashable:
        """Equal for leaves whose computations differ in numbers alone."""
        return self.inputs.key, tuple(self.names)

    def __call__(
        self, numbers: Numbers, piece: Piece, operands: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Computes the numbers with one block more."""
        left = iter(operands)
        before = [next(left) for _ in self.names]
        param = next(left) if self.inputs.has_params else None
        extra = next(left) if self.inputs.has_extra else None
        outs, _ = self.inputs.values(left, numbers.values, param, extra)
        made = []
        for name, number, elements in zip(self.names, before, outs, strict=True):
            reduce, join, _ = REDUCTIONS[name]
            elements = jnp.broadcast_to(elements, piece.shape)
            if piece.is_new is not None:
                elements = jnp.where(piece.is_new, elements, first_number(name, elements.dtype))
            made.append(join(number, reduce(elements)))
        return made


def first_number(name: str, dtype: Any) -> jax.Array:
    """What a reduction begins with."""
    first = {"reduce_sum": 0, "reduce_max": -jnp.inf, "reduce_min": jnp.inf}[name]
    return jnp.asarray(first, dtype)


def strides_of(shape: Shape) -> tuple[int, ...]:
    """The strides of an array, in elements."""
    made = [1]
    for size in shape[:0:-1]:
        made.append(made[-1] * size)
    return tuple(reversed(made))[: len(shape)]
