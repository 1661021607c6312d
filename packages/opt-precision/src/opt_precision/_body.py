"""The computation of one leaf, or of a piece of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from opt_precision import _bits
from opt_precision._formats import Format, decode, encode
from opt_precision._program import evaluate
from opt_precision._weights import Weights
from opt_precision._work import Shape

GRADIENT = -1
PARAMETER = -2


class Data(NamedTuple):
    """What tells the computation of one leaf from that of another like it.

    Attributes:
      numbers: scalars that the equations use.
      keys: of all noise of the step.
      first: where the leaf's are among them: of the parameter, and of each leaf of the state that
        mirrors it.
    """

    numbers: Sequence[Any]
    keys: jax.Array
    first: jax.Array | np.uint32


class Part(NamedTuple):
    """What of a leaf this device has.

    Attributes:
      origin: where the device's part begins.
      shape: of the part; `None` where it is the whole leaf, on one device.
    """

    origin: Sequence[Any]
    shape: Shape | None


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """How the pieces of a leaf become those of its results.

    Attributes:
      equations: of the update, that treat each element by itself.
      outs: the update, and each leaf of the state that mirrors the parameter.
      arguments: which variable is the gradient, the parameter, or which leaf of the state.
      arrays: variables of arrays that were computed whole.
      names: variables of scalars.
      formats: how each leaf of the state is stored; `None` as it is.
      weights: how parameters are rounded.
      has_params: whether there are parameters, or gradients alone.
      has_extra: whether something is kept besides the parameter.
      is_in_place: whether the new parameter is wanted, and not the update.
      shape: of the whole leaf.
    """

    equations: Sequence[JaxprEqn]
    outs: Sequence[Any]
    arguments: Mapping[Any, int]
    arrays: Sequence[Any]
    names: Sequence[Any]
    formats: Sequence[Format | None]
    weights: Weights
    has_params: bool
    has_extra: bool
    is_in_place: bool
    shape: Shape

    def key(self) -> Hashable:
        """Equal for leaves of one shape whose equations differ in their variables alone."""
        number: dict[Any, int] = {}

        def of(atom: Any) -> Hashable:
            if isinstance(atom, Literal):
                # A NaN is not equal to itself, and then the leaf is computed alone.
                value = np.asarray(atom.val)
                return str(atom.aval), value.item() if value.ndim == 0 else id(atom)
            return number.setdefault(atom, len(number))

        places = sorted(self.arguments.items(), key=lambda item: item[1])
        given = [(of(var), place) for var, place in places]
        starts = [(of(var), str(var.aval)) for var in (*self.arrays, *self.names)]
        equations = [
            (eqn.primitive, _params_key(eqn.params), *map(of, eqn.invars), *map(of, eqn.outvars))
            for eqn in self.equations
        ]
        flags = self.weights, self.has_params, self.has_extra, self.is_in_place, self.shape
        outs = tuple(map(of, self.outs))
        return tuple(given), tuple(starts), tuple(equations), outs, tuple(self.formats), flags

    def __call__(
        self, part: Part, data: Data, shape: Shape | None, origin: Sequence[Any], values: Any
    ) -> list[jax.Array]:
        """Computes a piece.

        Args:
          part: the device's part of the leaf.
          data: what is the leaf's own.
          shape: of the piece; `None` for all of the part.
          origin: where it begins in the part.
          values: the pieces of the operands, in the order of `Step`.
        """
        read = iter(values)
        buffer = next(read)
        param = buffer if self.is_in_place else next(read) if self.has_params else None
        extra = next(read) if self.has_extra else None
        known: dict[Any, Any] = dict(zip(self.names, data.numbers, strict=True))
        places = {place: var for var, place in self.arguments.items()}
        if GRADIENT in places:
            known[places[GRADIENT]] = _bits.widen(next(read))
        if PARAMETER in places and param is not None:
            known[places[PARAMETER]] = self.weights.value(param, extra)
        dtypes = []
        for place, form in enumerate(self.formats):
            codes = next(read)
            dtypes.append(codes.dtype)
            if form is not None:
                codes = decode(form, codes, next(read) if form.block else None)
            known[places[place]] = codes
        known |= zip(self.arrays, read, strict=True)
        for eqn in self.equations:
            made = evaluate(eqn, [_look(known, atom) for atom in eqn.invars], shape or part.shape)
            known.update(zip(eqn.outvars, made, strict=True))
        update, *states = (_look(known, out) for out in self.outs)
        begin = tuple(first + more for first, more in zip(part.origin, origin, strict=True))
        index = functools.cache(lambda: self._index(buffer.shape, begin))

        number = 1 + len(self.formats)
        keys = functools.cache(lambda: lax.dynamic_slice(data.keys, [data.first], [number]))

        def noise(place: int) -> Callable[[], jax.Array]:
            return lambda: _bits.noise_at(lax.index_in_dim(keys(), place, keepdims=False), index())

        results = self._placed(param, extra, update, noise(0), buffer)
        rows = zip(self.formats, dtypes, states, strict=True)
        for place, (form, dtype, new) in enumerate(rows, 1):
            results += _stored(form, dtype, new, noise(place))
        return results

    def _index(self, shape: Shape, origin: tuple[Any, ...]) -> jax.Array:
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return _bits.global_index(shape, origin, strides)

    def _placed(
        self,
        param: jax.Array | None,
        extra: jax.Array | None,
        update: jax.Array,
        noise: Callable[[], jax.Array],
        buffer: jax.Array,
    ) -> list[jax.Array]:
        """The new parameter, or the update that makes it, and what is kept besides it."""
        weights = self.weights
        if param is None or (not self.is_in_place and weights.method == "nearest"):
            return [update.astype(buffer.dtype)]
        is_met = weights.is_met_by(param.dtype)
        is_random = is_met and weights.method == "stochastic"
        new, kept = weights.place(param, extra, update, noise() if is_random else None)
        if not self.is_in_place:
            if is_met:
                update = _bits.widen(new) - _bits.widen(param)
            new = update.astype(buffer.dtype)
        return [new] if kept is None else [new, kept]


def _stored(
    form: Format | None, dtype: Any, new: jax.Array, noise: Callable[[], jax.Array]
) -> list[jax.Array]:
    """A leaf of the state as it is stored."""
    if form is None:
        return [new.astype(dtype)]
    codes, scale = encode(form, new, noise() if form.stochastic else None)
    return [codes] if scale is None else [codes, scale]


def _params_key(params: Mapping[str, Any]) -> Hashable:
    """Parameters of an equation; functions that were traced are equal to themselves alone."""
    found = []
    for name, value in params.items():
        try:
            hash(value)
            found.append((name, value))
        except TypeError:
            found.append((name, id(value)))
    return tuple(found)


def _look(known: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]
