"""One leaf piece by piece, in place: the temporaries of a step are those of one piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
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
    """An array that goes with a leaf.

    Attributes:
      value: the array; of the leaf's shape, or with an element per block.
      blocks: `None` for one of the leaf's shape.
      is_result: whether the piece that was computed takes the place of the one that was read.
    """

    value: jax.Array
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
) -> list[jax.Array]:
    """Computes the results of a leaf piece by piece, each in the place of what it is made of.

    Args:
      shape: of the leaf, as far as this device has it.
      operands: the arrays; those that are results are replaced.
      compute: from the shape of a piece (`None` for the whole leaf), where it begins and the
        pieces of all operands to those of the results, in order.
      grids: the pieces.

    Returns:
      The results, in the order of the operands that they replace.
    """
    results = [operand.value for operand in operands if operand.is_result]
    for grid in grids:
        if grid.piece == shape:
            return list(compute(None, grid.origin, [operand.value for operand in operands]))
        results = _run(grid, operands, results, compute)
    return results


def _run(
    grid: Grid, operands: Sequence[Operand], results: list[jax.Array], compute: Compute
) -> list[jax.Array]:
    slots = [operand for operand in operands if operand.is_result]

    def body(index: Any, carry: list[jax.Array]) -> list[jax.Array]:
        origin = _origin(grid, index)
        held = iter(carry)
        read = [
            _cut(next(held) if operand.is_result else operand.value, operand.blocks, grid, origin)
            for operand in operands
        ]
        made = compute(grid.piece, origin, read)
        return [
            lax.dynamic_update_slice(whole, piece, _starts(operand.blocks, origin))
            for whole, piece, operand in zip(carry, made, slots, strict=True)
        ]

    if grid.number == 1:
        return body(0, results)
    looped: list[jax.Array] = lax.fori_loop(0, grid.number, body, results)
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
