"""One leaf piece by piece, in place: the temporaries of a step are those of one piece."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opt_precision._step.loops import (
    after,
    as_floats,
    as_integers,
    hidden,
    loop,
    varying,
    zero_of,
)
from opt_precision._step.memory import fetched, is_on_host, placed_like
from opt_precision._step.rows import batches, in_turn, joined, parted
from opt_precision._step.work import Blocks, Compute, Operand, Origin, Shape, Work


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
      [Grid(origin=(0, 0), counts=(8, 1), piece=(125, 512))]
      >>> [grid.piece for grid in pieces((1009, 512), 100_000, {1: 256})]
      [(195, 512), (34, 512)]
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
    works: Sequence[Work], limit: int, zero: jax.Array
) -> tuple[list[list[jax.Array]], jax.Array]:
    """Computes leaves one after the other, piece by piece, each result in place of its source.

    Small leaves that are alike become rows of one array: compiled once, and copied for it.

    Args:
      works: the leaves.
      limit: the elements of one piece, which may be several small leaves.
      zero: an int32 that is 0, which the compiler must not know: without it the loops would not be
        loops, or run side by side.

    Returns:
      The results of each leaf, and a zero that is not known before all loops have ended.
    """
    found: dict[int, list[jax.Array]] = {}

    def key_of(work: Work) -> Hashable | None:
        return work.view and work.view.key

    for members in batches(works, limit, key_of):
        batch = [works[k] for k in members]
        [made], zero = _one_by_one([joined(batch, zero)], limit, zero)
        found |= zip(members, parted(batch, made, zero), strict=True)
    left = [k for k in range(len(works)) if k not in found]
    for members in batches([works[k] for k in left], limit, lambda work: work.key):
        places = [left[i] for i in members]
        results, zero = in_turn([works[k] for k in places], zero)
        found |= zip(places, results, strict=True)
    alone = [k for k in left if k not in found]
    results, zero = _one_by_one([works[k] for k in alone], limit, zero)
    found |= zip(alone, results, strict=True)
    return [found[k] for k in range(len(works))], zero


def _one_by_one(
    works: Sequence[Work], limit: int, zero: jax.Array
) -> tuple[list[list[jax.Array]], jax.Array]:
    """The leaves that are not alike, or large; small ones share a piece."""
    works = _shared(_with_hidden(works, zero))
    found: dict[int, list[jax.Array]] = {}
    small: list[int] = []
    jobs: list[tuple[list[int], Grid | None]] = []
    for k, work in enumerate(works):
        if not work.is_looped:
            found[k] = _whole(work, work.results)
            continue
        if work.size > limit:
            grids = pieces(work.shape, limit, work.units)
            jobs += [([k], grid if grid.piece != work.shape else None) for grid in grids]
            continue
        if sum(works[other].size for other in small) + work.size > limit:
            jobs.append((small, None))
            small = []
        small.append(k)
    jobs += [(small, None)] if small else []
    found |= {k: work.results for k, work in enumerate(works) if k not in found}
    for members, grid in jobs:
        held = [found[k] for k in members]
        if grid is None:
            end, made = loop(functools.partial(_body, [works[k] for k in members]), zero, 1, held)
            zero = end - 1
        else:
            end, results = _loop_of_pieces(works[members[0]], grid, zero, held[0])
            zero, made = end - grid.number, [results]
        found |= zip(members, made, strict=True)
    return [found[k] for k in range(len(works))], zero


def _with_hidden(works: Sequence[Work], zero: jax.Array) -> list[Work]:
    """Numbers of NumPy that tell leaves apart become arrays, so that one function is for all."""
    leaves, tree = jax.tree.flatten([work.data for work in works])
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.generic)]
    for i, number in zip(at, hidden([int(leaves[i]) for i in at], zero), strict=True):
        leaves[i] = number
    data = jax.tree.unflatten(tree, leaves)
    return [work._replace(data=own) for work, own in zip(works, data, strict=True)]


def _shared(works: Sequence[Work]) -> list[Work]:
    """Leaves that are alike are traced and lowered once, as one function that is called."""
    number = Counter(work.key for work in works)
    made: dict[Hashable, Compute] = {}
    return [
        work._replace(compute=made.setdefault(work.key, _called(work.compute)))
        if number[work.key] > 1 and work.is_cut
        else work
        for work in works
    ]


def _called(compute: Compute) -> Compute:
    @functools.partial(jax.jit, static_argnums=1)
    def leaf(data: Any, shape: Shape | None, origin: Any, values: Any) -> Any:
        return compute(data, shape, origin, values)

    return leaf


def _loop_of_pieces(
    work: Work, grid: Grid, zero: jax.Array, held: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """The loop over the pieces of a leaf; XLA on CPUs writes all of an array of 8-bit floats."""
    run = functools.partial(_buffered_loop, work, grid)

    def by_bits(zero: jax.Array, held: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        # The integers are a copy: of one leaf after the other.
        bits = [as_integers(after(x, zero)) if _is_written_whole(x) else x for x in held]
        end, made = run(zero, bits)
        return end, [as_floats(new, old.dtype) for new, old in zip(made, held, strict=True)]

    if not any(map(_is_written_whole, held)):
        return run(zero, held)
    found: tuple[jax.Array, list[jax.Array]] = lax.platform_dependent(
        zero, held, cpu=by_bits, default=run
    )
    return found


def _is_written_whole(x: jax.Array) -> bool:
    """Whether XLA on CPUs writes all of an array for a piece of it."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return is_float and x.dtype.itemsize == 1 and not is_on_host(x)


def _buffered_loop(
    work: Work, grid: Grid, zero: jax.Array, held: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """As `loop`, with two pieces on the device: the next is there before one is computed."""
    slots = [operand for operand in work.operands if operand.is_result]
    first = _origin(grid, zero)

    def body(index: Any, carry: Any) -> Any:
        held, ready = carry
        made = _piece(work, grid, index, ready)
        places = _origin(grid, index), _origin(grid, index + 1)
        rows = zip(slots, held, made, strict=True)
        both = [_exchanged(slot, old, new, grid, places, zero) for slot, old, new in rows]
        return [whole for whole, _ in both], [piece for _, piece in both]

    ready = [
        old if slot.is_total else _ready(slot, old, grid, first)
        for slot, old in zip(slots, held, strict=True)
    ]
    end, (made, _) = loop(body, zero, grid.number, (held, ready))
    return end, made


def _exchanged(
    slot: Operand,
    old: jax.Array,
    new: jax.Array,
    grid: Grid,
    places: tuple[Origin, Origin],
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes a piece, and gets the next one: of an array on the host while the piece is computed.

    Neither may be in the way of the other, or compilers copy the whole array for each piece.
    """
    if slot.is_total:
        return new, new
    bits = new if new.dtype == old.dtype else as_integers(new)
    starts = _starts(slot.blocks, places[0])
    if grid.number == 1:  # there is no next piece: to slice the result would copy it
        return lax.dynamic_update_slice(old, placed_like(bits, old), starts), new
    if not is_on_host(old):
        whole = lax.dynamic_update_slice(old, bits, starts)
        return whole, _ready(slot, whole, grid, places[1])
    ready = _ready(slot, old, grid, places[1])
    bits = placed_like(after(bits, zero_of(ready, zero)), old)
    return lax.dynamic_update_slice(old, bits, starts), ready


def _ready(slot: Operand, whole: jax.Array, grid: Grid, place: Origin) -> jax.Array:
    """A piece on the device."""
    return as_floats(fetched(_cut(whole, slot.blocks, grid, place)), slot.value.dtype)


def _body(works: Sequence[Work], index: Any, carry: Any) -> list[list[jax.Array]]:
    return [_whole(work, held, index) for work, held in zip(works, carry, strict=True)]


def _whole(work: Work, held: Sequence[jax.Array], index: Any = None) -> list[jax.Array]:
    """Computes a leaf as one piece; in a loop, `index` is the number of its only iteration."""
    others = [operand.value for operand in work.operands if not operand.is_result]
    origin: list[Any] = [0] * len(work.shape)
    if index is not None:
        others = [varying(other, index) for other in others]
        origin[:1] = [index] * len(origin[:1])  # which is 0
    left, right = iter(held), iter(others)
    values = [fetched(next(left if operand.is_result else right)) for operand in work.operands]
    made = work.compute(work.data, None, tuple(origin), values)
    return [placed_like(new, old) for new, old in zip(made, held, strict=True)]


def _piece(work: Work, grid: Grid, index: Any, ready: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Computes a piece; of what it replaces, the pieces are ready on the device."""
    origin, buffers = _origin(grid, index), iter(ready)
    values = [
        next(buffers) if operand.is_result else _cut_read_only(operand, grid, origin, index)
        for operand in work.operands
    ]
    return work.compute(work.data, grid.piece, origin, values)


def _origin(grid: Grid, index: Any) -> Origin:
    """Where a piece begins, by its number; of one type, also with numbers of 64 bits."""
    starts: list[Any] = []
    for first, count, size in zip(
        reversed(grid.origin), reversed(grid.counts), reversed(grid.piece), strict=True
    ):
        starts.append(first + (index % count) * size if count > 1 else np.int32(first))
        index = index // count if count > 1 else index
    return tuple(reversed(starts))


def _starts(blocks: Blocks | None, origin: Origin) -> list[Any]:
    return [
        at // blocks.size if blocks is not None and dim == blocks.axis else at
        for dim, at in enumerate(origin)
    ]


def _cut(whole: jax.Array, blocks: Blocks | None, grid: Grid, origin: Origin) -> jax.Array:
    sizes = list(grid.piece)
    if blocks is not None:
        sizes[blocks.axis] = math.ceil(sizes[blocks.axis] / blocks.size)
    return lax.dynamic_slice(whole, _starts(blocks, origin), sizes)


def _cut_read_only(operand: Operand, grid: Grid, origin: Origin, index: Any) -> jax.Array:
    """As `_cut`; XLA on CPUs slices short floats in float32, and would hold all of them in it."""
    whole, blocks = operand.value, operand.blocks

    def by_bits(whole: jax.Array, origin: Origin) -> jax.Array:
        return as_floats(
            _cut(as_integers(varying(whole, index)), blocks, grid, origin), whole.dtype
        )

    def plainly(whole: jax.Array, origin: Origin) -> jax.Array:
        return _cut(whole, blocks, grid, origin)

    if is_on_host(whole):
        return fetched(plainly(whole, origin))

    if not (jnp.issubdtype(whole.dtype, jnp.floating) and whole.dtype.itemsize < 4):
        return plainly(whole, origin)
    made: jax.Array = lax.platform_dependent(whole, origin, cpu=by_bits, default=plainly)
    return made
