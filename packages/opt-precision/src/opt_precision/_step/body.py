"""The computation of one leaf, or of a piece of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from opt_precision import _bits
from opt_precision._formats import Format, decode, encode
from opt_precision._step.equations import Atom, Equation, Value, evaluate, read
from opt_precision._step.work import Shape
from opt_precision._weights import Weights

GRADIENT = -1
PARAMETER = -2


class Data(NamedTuple):
    """What tells the computation of one leaf from that of another like it.

    Attributes:
      numbers: scalars that the equations use.
      zero: see `opt_precision._bits.sealed`; `None` where products may round as they like.
      keys: of all noise of the step, an array; `None` where nothing is rounded.
      first: where the leaf's are among them, a number: of the parameter, and of each leaf of the
        state that mirrors it.
    """

    numbers: Sequence[Any]
    zero: jax.Array | None
    keys: Any = None
    first: Any = None

    def seal(self, product: jax.Array) -> jax.Array:
        """A product as it was rounded."""
        return product if self.zero is None else _bits.sealed(product, self.zero)


class Part(NamedTuple):
    """What of a leaf this device has.

    Attributes:
      origin: where the device's part begins.
      shape: of the part.
    """

    origin: Sequence[Any]
    shape: Shape


def signature(
    equations: Sequence[Equation],
    arguments: Mapping[Value, int],
    starts: Sequence[Value],
    outs: Sequence[Atom],
) -> Hashable:
    """Equal for equations that differ in the names of their values alone.

    Args:
      equations: in order.
      arguments: see `Inputs`.
      starts: other values that they start from.
      outs: the values that are wanted.
    """
    number: dict[Any, int] = {}

    def of(atom: Any) -> Hashable:
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return str(atom.aval), value.tobytes() if value.ndim == 0 else id(atom)
        return number.setdefault(atom, len(number))

    places = sorted(arguments.items(), key=lambda item: item[1])
    made = [
        (
            equation.source.primitive,
            # Numbers are broadcast to pieces, whatever the shape of the leaf.
            () if equation.name == "broadcast_in_dim" else _params_key(equation),
            *map(of, equation.inputs),
            *map(of, equation.outputs),
        )
        for equation in equations
    ]
    given = [(of(value), place) for value, place in places]
    others = [(of(value), str(value.aval.dtype)) for value in starts]
    return tuple(made), tuple(given), tuple(others), tuple(map(of, outs))


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """The equations of a leaf, and which operands they start from.

    Attributes:
      equations: of the update, that treat each element by itself.
      arguments: which value is the gradient, the parameter, or which leaf of the state.
      arrays: values that were computed whole.
      numbers: values of one element.
      formats: how each leaf of the state is stored; `None` as it is.
      weights: how parameters are rounded.
      has_params: whether there are parameters, or gradients alone.
      has_extra: whether something is kept besides the parameter.
      signature: see `signature`.
    """

    equations: Sequence[Equation]
    arguments: Mapping[Value, int]
    arrays: Sequence[Value]
    numbers: Sequence[Value]
    formats: Sequence[Format | None]
    weights: Weights
    has_params: bool
    has_extra: bool
    signature: Hashable

    @property
    def key(self) -> Hashable:
        """Equal for leaves whose values differ in their names alone."""
        flags = self.weights, self.has_params, self.has_extra
        return self.signature, tuple(self.formats), flags

    def values(
        self,
        operands: Iterator[jax.Array],
        numbers: Sequence[Any],
        shape: Shape,
        param: jax.Array | None,
        extra: jax.Array | None,
        seal: _bits.Seal,
    ) -> tuple[dict[Value, Any], list[jax.Array]]:
        """Returns all values on a piece, and the leaves of the state as they are stored.

        Args:
          operands: pieces of the gradient, of the state, and of what was computed whole.
          numbers: what `numbers` are.
          shape: of the piece.
          param: the piece of the parameter.
          extra: that of what is kept besides it.
          seal: what products go through.
        """
        known: dict[Value, Any] = dict(zip(self.numbers, numbers, strict=True))
        places = {place: value for value, place in self.arguments.items()}
        if GRADIENT in places:
            known[places[GRADIENT]] = _bits.widen(next(operands))
        if PARAMETER in places and param is not None:
            known[places[PARAMETER]] = self.weights.value(param, extra)
        stored = []
        for place, form in enumerate(self.formats):
            codes = next(operands)
            stored.append(codes)
            if form is not None:
                codes = decode(form, codes, next(operands) if form.block else None, seal)
            known[places[place]] = codes
        known |= zip(self.arrays, operands, strict=True)
        return evaluate(self.equations, known, shape, seal), stored


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """How the pieces of a leaf become those of its new values.

    Attributes:
      inputs: what they are made of.
      outs: the update, and each leaf of the state that mirrors the parameter.
      is_in_place: whether the new parameter is wanted, and not the update.
      strides: of the whole leaf, in elements.
    """

    inputs: Inputs
    outs: Sequence[Atom]
    is_in_place: bool
    strides: tuple[int, ...]

    def key(self) -> Hashable:
        """Equal for leaves whose equations differ in their variables alone."""
        return self.inputs.key, self.is_in_place, self.strides

    @property
    def noises(self) -> list[int]:
        """Which noise is needed: of the parameter, 0, and of each leaf of the state, from 1."""
        forms = self.inputs.formats
        found = [place for place, form in enumerate(forms, 1) if form and form.needs_noise]
        return [0, *found] if self.inputs.weights.needs_noise else found

    def __call__(
        self, part: Part, data: Data, shape: Shape | None, origin: Sequence[Any], operands: Any
    ) -> list[jax.Array]:
        """Computes a piece.

        Args:
          part: the device's part of the leaf.
          data: what is the leaf's own.
          shape: of the piece; `None` for all of the part.
          origin: where it begins in the part.
          operands: the pieces of the operands, in the order of `Step`.
        """
        begin = tuple(first + more for first, more in zip(part.origin, origin, strict=True))
        piece = shape or part.shape
        index = functools.cache(lambda: _bits.global_index(piece, begin, self.strides))
        number = 1 + len(self.inputs.formats)
        keys = functools.cache(lambda: lax.dynamic_slice(data.keys, [data.first], [number]))

        def noise(place: int) -> jax.Array:
            return _bits.noise_at(lax.index_in_dim(keys(), place, keepdims=False), index())

        return self.compute(data, piece, operands, noise)

    def compute(
        self,
        data: Data,
        shape: Shape,
        operands: Sequence[jax.Array],
        noise: Callable[[int], jax.Array],
    ) -> list[jax.Array]:
        """Computes a piece.

        Args:
          data: what is the leaf's own.
          shape: of the piece.
          operands: see `__call__`.
          noise: the noise of the parameter, 0, and of each leaf of the state.
        """
        left = iter(operands)
        buffer = next(left)
        has_params = self.inputs.has_params
        param = buffer if self.is_in_place else next(left) if has_params else None
        extra = next(left) if self.inputs.has_extra else None
        known, stored = self.inputs.values(left, data.numbers, shape, param, extra, data.seal)
        update, *states = (read(known, out) for out in self.outs)
        results = self._placed(param, extra, update, noise, buffer)
        rows = zip(self.inputs.formats, stored, states, strict=True)
        for place, (form, old, new) in enumerate(rows, 1):
            results += _stored(form, old, new, functools.partial(noise, place), data.seal)
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


# What makes one number of a piece, and what joins it to that of the pieces before.
_REDUCE: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "reduce_max": (jnp.max, lax.max),
    "reduce_min": (jnp.min, lax.min),
    "reduce_sum": (jnp.sum, lax.add),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """How the pieces of a leaf become numbers, of those that other pieces made.

    Attributes:
      inputs: what they are made of.
      names: for each number the primitive that makes it.
      outs: for each number the values whose elements it is made of.
    """

    inputs: Inputs
    names: Sequence[str]
    outs: Sequence[Atom]

    def key(self) -> Hashable:
        """Equal for leaves whose equations differ in their variables alone."""
        return self.inputs.key, tuple(self.names)

    def __call__(
        self, part: Part, data: Data, shape: Shape | None, origin: Sequence[Any], operands: Any
    ) -> list[jax.Array]:
        """Computes the numbers of one piece more; the arguments are those of `Update`."""
        del origin
        left = iter(operands)
        before = [next(left) for _ in self.names]
        param = next(left) if self.inputs.has_params else None
        extra = next(left) if self.inputs.has_extra else None
        piece = shape or part.shape
        known, _ = self.inputs.values(left, data.numbers, piece, param, extra, data.seal)
        made = []
        for name, number, out in zip(self.names, before, self.outs, strict=True):
            reduce, join = _REDUCE[name]
            made.append(join(number, reduce(read(known, out))))
        return made


def first_number(name: str, dtype: Any) -> jax.Array:
    """What a reduction begins with."""
    if name == "reduce_sum":
        return jnp.zeros((), dtype)
    least: Any = jnp.asarray(-jnp.inf if name == "reduce_max" else jnp.inf, dtype)
    return least  # type: ignore[no-any-return]


def _stored(
    form: Format | None,
    old: jax.Array,
    new: jax.Array,
    noise: Callable[[], jax.Array],
    seal: _bits.Seal,
) -> list[jax.Array]:
    """A leaf of the state as it is stored."""
    if form is None:
        return [new.astype(old.dtype)]
    codes, scale = encode(form, new, noise() if form.needs_noise else None, old, seal)
    return [codes] if scale is None else [codes, scale]


def _params_key(equation: Equation) -> Hashable:
    """Parameters of an equation; functions that were traced are equal to themselves alone."""
    found: list[Any] = [] if equation.choice is None else [id(equation.choice)]
    for name, value in equation.source.params.items():
        try:
            hash(value)
            found.append((name, value))
        except TypeError:
            found.append((name, id(value)))
    return tuple(found)
