"""One leaf piece by piece, in place: the temporaries of a step are those of one piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Origin: TypeAlias = tuple[Any, ...]
Shape: TypeAlias = tuple[int, ...]


class Blocks(NamedTuple):
    """What an array has one element for: blocks along an axis of the leaf.

    Attributes:
      axis: of the leaf.
      size: of a block.
    """

    axis: int
    size: int


class Operand(NamedTuple):
    """One array of each leaf of a batch.

    Attributes:
      values: an array per leaf; of the leaf's shape, or with an element per block.
      blocks: `None` for arrays of the leaf's shape.
      is_result: whether the piece that was computed takes the place of the one that was read.
    """

    values: list[jax.Array]
    blocks: Blocks | None = None
    is_result: bool = False


Compute: TypeAlias = Callable[[Shape | None, Origin, Sequence[jax.Array]], Sequence[jax.Array]]


class Grid(NamedTuple):
    """Pieces of one shape, side by side.

    Attributes:
      origin: where the first begins.
      counts: how many there are along each axis.
      piece: the shape of each.
    """

    origin: Shape
    counts: Shape
    piece: Shape

    @property
    def number(self) -> int:
        """How many pieces there are."""
        return math.prod(self.counts)


def pieces(shape: Shape, limit: int, units: Mapping[int, int]) -> list[Grid]:
    """Cuts an array into pieces of at most `limit` elements, as far as whole units allow.

    Rows are cut off the leading axis; where one row is too large, each row along the next.

    Args:
      shape: of the array.
      limit: the elements of one piece.
      units: per axis what may not be cut apart; 1 for the others.

    Examples:
      >>> pieces((1000, 512), 100_000, {1: 256})
      [Grid(origin=(0, 0), counts=(5, 1), piece=(195, 512)), ...piece=(25, 512))]
      >>> pieces((4, 1024), 300, {1: 256})
      [Grid(origin=(0, 0), counts=(4, 4), piece=(1, 256))]
    """
    if math.prod(shape) <= limit or 0 in shape:
        return [Grid((0,) * len(shape), (1,) * len(shape), shape)]
    piece = list(shape)
    for axis, size in enumerate(shape):
        unit = units.get(axis, 1)
        rest = math.prod(piece[:axis]) * math.prod(shape[axis + 1 :])
        fits = limit // rest // unit * unit
        if fits >= unit:
            piece[axis] = _even(size, fits, unit)
            return _grids(shape, tuple(piece), axis)
        if size % unit == 0:
            piece[axis] = unit
    return _grids(shape, tuple(piece), len(shape) - 1)


def _even(size: int, fits: int, unit: int) -> int:
    """A divisor of an axis that is not much less than what fits, or else what fits."""
    for count in range(-(-size // fits), 2 * -(-size // fits) + 1):
        if size % count == 0 and (size // count) % unit == 0:
            return size // count
    return fits


def _grids(shape: Shape, piece: Shape, axis: int) -> list[Grid]:
    counts = tuple(size // part for size, part in zip(shape, piece, strict=True))
    grids = [Grid((0,) * len(shape), counts, piece)]
    if tail := shape[axis] % piece[axis]:
        origin = tuple(shape[axis] - tail if dim == axis else 0 for dim in range(len(shape)))
        one = tuple(1 if dim == axis else count for dim, count in enumerate(counts))
        rest = tuple(tail if dim == axis else part for dim, part in enumerate(piece))
        grids.append(Grid(origin, one, rest))
    return grids


def stream(
    shape: Shape, operands: Sequence[Operand], compute: Compute, grids: Sequence[Grid]
) -> list[list[jax.Array]]:
    """Computes the results of a batch of leaves piece by piece, each in the place of its source.

    Leaves of one shape go together: the pieces of all are stacked, so that there is one computation
    to compile, however many layers a model has.

    Args:
      shape: of the leaves, as far as this device has them.
      operands: the arrays; those that are results are replaced.
      compute: from the shape of a piece (`None` for whole leaves), where it begins and the pieces
        of all operands to those of the results, in order; of several leaves each has an axis in
        front.
      grids: the pieces.

    Returns:
      The results in the order of the operands that they replace, an array per leaf.
    """
    slots = [operand for operand in operands if operand.is_result]
    results = [list(operand.values) for operand in slots]
    for grid in grids:
        if grid.piece == shape:
            made = compute(None, grid.origin, [_stacked(operand.values) for operand in operands])
            return [_unstacked(one, len(old)) for one, old in zip(made, results, strict=True)]
        results = _run(grid, operands, results, compute)
    return results


def _stacked(values: Sequence[jax.Array]) -> jax.Array:
    return values[0] if len(values) == 1 else jnp.stack(values)


def _unstacked(value: jax.Array, number: int) -> list[jax.Array]:
    return [value] if number == 1 else [value[k] for k in range(number)]


def _run(
    grid: Grid,
    operands: Sequence[Operand],
    results: list[list[jax.Array]],
    compute: Compute,
) -> list[list[jax.Array]]:
    slots = [operand for operand in operands if operand.is_result]

    def body(index: Any, carry: list[list[jax.Array]]) -> list[list[jax.Array]]:
        origin = _origin(grid, index)
        held = iter(carry)
        read = [
            _stacked(
                [
                    _cut(value, operand.blocks, grid, origin)
                    for value in (next(held) if operand.is_result else operand.values)
                ]
            )
            for operand in operands
        ]
        made = compute(grid.piece, origin, read)
        return [
            [
                lax.dynamic_update_slice(old, new, _starts(operand.blocks, origin))
                for old, new in zip(whole, _unstacked(piece, len(whole)), strict=True)
            ]
            for whole, piece, operand in zip(carry, made, slots, strict=True)
        ]

    if grid.number == 1:
        return body(0, results)
    looped: list[list[jax.Array]] = lax.fori_loop(0, grid.number, body, results)
    return looped


def _origin(grid: Grid, index: Any) -> Origin:
    """Where a piece begins, by its number."""
    starts: list[Any] = []
    for first, count, size in zip(
        reversed(grid.origin), reversed(grid.counts), reversed(grid.piece), strict=True
    ):
        starts.append(first + (index % count) * size if count > 1 else first)
        index = index // count if count > 1 else index
    return tuple(reversed(starts))


def _starts(blocks: Blocks | None, origin: Origin) -> list[Any]:
    if blocks is None:
        return list(origin)
    return [at // blocks.size if dim == blocks.axis else at for dim, at in enumerate(origin)]


def _cut(whole: jax.Array, blocks: Blocks | None, grid: Grid, origin: Origin) -> jax.Array:
    sizes = list(grid.piece)
    if blocks is not None:
        sizes[blocks.axis] = math.ceil(sizes[blocks.axis] / blocks.size)
    return lax.dynamic_slice(whole, _starts(blocks, origin), sizes)
