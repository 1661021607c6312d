"""One leaf after the other, block by block, in place: temporaries are those of one block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opt_precision._memory import fetched, is_on_host, placed_like

Shape: TypeAlias = tuple[int, ...]


class Blocks(NamedTuple):
    """What an array has one element for: blocks along an axis of the leaf."""

    axis: int  # of the leaf
    size: int  # of a block


class Operand(NamedTuple):
    """An array that goes with a leaf."""

    value: jax.Array  # the array; of the leaf's shape, or with an element per block
    blocks: Blocks | None = None  # `None` for one of the leaf's shape
    # Whether the block that was computed takes the place of the one that was read.
    is_result: bool = False
    is_total: bool = False  # whether it is one number for the whole leaf, which each block changes


class Piece(NamedTuple):
    """A block of a leaf."""

    shape: Shape  # of it
    origin: tuple[Any, ...]  # where it begins in what this device has of the leaf
    is_new: jax.Array | None = None  # `None`, or a mask of the elements that no earlier block had


# From numbers, a block and its operands to the results, in order.
Body: TypeAlias = Callable[[Any, Piece, Sequence[jax.Array]], Sequence[jax.Array]]


class Work(NamedTuple):
    """What is to be computed for one leaf."""

    shape: Shape  # of the leaf, as far as this device has it
    piece: Shape  # of a block
    operands: Sequence[Operand]  # its arrays; those that are results are replaced
    body: Body  # computes a block
    numbers: Any  # what `body` needs besides, a tree of arrays that are not cut
    key: Hashable  # equal for leaves whose computations differ in nothing but `numbers`

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def counts(self) -> Shape:
        """How many blocks there are along each axis."""
        return tuple(-(-size // part) for size, part in zip(self.shape, self.piece, strict=True))

    @property
    def results(self) -> list[jax.Array]:
        """What the results replace."""
        return [operand.value for operand in self.operands if operand.is_result]


def piece_shape(shape: Shape, limit: int, units: Mapping[int, int], *, is_even: bool) -> Shape:
    """The shape of blocks of at most `limit` elements, as far as whole units allow.

    Rows are cut off the leading axis; where one row is too large, each row along the next.

    Examples:
      >>> piece_shape((1000, 512), 100_000, {1: 256}, is_even=False)
      (125, 512)
      >>> piece_shape((1009, 512), 100_000, {1: 256}, is_even=False)
      (195, 512)
      >>> piece_shape((4, 1024), 300, {1: 256}, is_even=False)
      (1, 256)
    """
    piece = list(shape)
    for axis, size in enumerate(shape):
        if math.prod(piece) <= limit or 0 in shape:
            break
        unit = units.get(axis, 1)
        if size % unit:
            continue
        rest = math.prod(piece) // size
        fits = max(unit, min(size, limit // rest // unit * unit))
        even = [
            size // count
            for count in range(
                -(-size // fits), size // unit + 1 if is_even else 2 * size // fits + 1
            )
            if size % count == 0 and (size // count) % unit == 0
        ]
        piece[axis] = even[0] if even else fits
    return tuple(piece)


def stream(
    works: Sequence[Work], limit: int, zero: jax.Array
) -> tuple[list[list[jax.Array]], jax.Array]:
    """Computes leaves one after the other, block by block, each result in place of its source.

    Small leaves that are alike are stacked, and compiled once.
    """
    groups = _groups(works, limit)
    made: dict[int, list[jax.Array]] = {}
    for job in _jobs([[works[k] for k in members] for members in groups], limit):
        joined = [_stacked([works[k] for k in groups[g]], zero) for g in job]
        held = [work.results for work in joined]
        if joined[0].piece != joined[0].shape:
            results, zero = _loop_of_blocks(joined[0], held[0], zero)
            found = [results]
        else:
            found, zero = _loop(functools.partial(_together, joined), zero, 1, held)
        for g, results in zip(job, found, strict=True):
            made |= zip(groups[g], _parted(results, len(groups[g]), zero), strict=True)
    return [made[k] for k in range(len(works))], zero


def _groups(works: Sequence[Work], limit: int) -> list[list[int]]:
    """Small leaves whose computations differ in numbers alone, as many as make one block."""
    groups: dict[Hashable, list[list[int]]] = {}
    for k, work in enumerate(works):
        alike = groups.setdefault(work.key, [])
        if not alike or work.size * (len(alike[-1]) + 1) > limit:
            alike.append([])
        alike[-1].append(k)
    return [members for alike in groups.values() for members in alike]


def _stacked(works: Sequence[Work], zero: jax.Array) -> Work:
    """Leaves that are alike as one, which is compiled once."""
    work = works[0]
    if len(works) == 1:
        return work
    own: Any = [jax.tree.leaves(work.numbers) for work in works]
    is_one = [all(x is column[0] for x in column) for column in zip(*own, strict=True)]
    numbers = [
        column[0] if one else _stack(column)
        for column, one in zip(zip(*own, strict=True), is_one, strict=True)
    ]
    tree = jax.tree.structure(work.numbers)
    operands = [
        column[0]._replace(value=_stack([_varying(column[0].value, zero), *_values_of(column[1:])]))
        for column in zip(*(work.operands for work in works), strict=True)
    ]

    def body(numbers: Any, piece: Piece, values: Sequence[jax.Array]) -> Any:
        origin = (piece.origin[0], *(0 for _ in work.shape[1:])) if work.shape else ()

        def one(numbers: Any, values: Any) -> Any:
            return list(
                work.body(jax.tree.unflatten(tree, numbers), Piece(work.shape, origin), values)
            )

        axes = [None if one else 0 for one in is_one]
        return jax.vmap(one, in_axes=(axes, 0))(numbers, list(values))

    shape = (len(works), *work.shape)
    return Work(shape, shape, operands, body, numbers, None)


def _stack(leaves: Sequence[Any]) -> Any:
    is_known = all(isinstance(leaf, np.generic) for leaf in leaves)
    return np.stack(leaves) if is_known else jnp.stack(leaves)


def _values_of(operands: Sequence[Operand]) -> list[jax.Array]:
    return [operand.value for operand in operands]


def _parted(results: list[jax.Array], number: int, zero: jax.Array) -> list[list[jax.Array]]:
    """The results of each leaf of those that are alike."""
    if number == 1:
        return [results]

    def hide(index: Any, carry: Any) -> Any:
        return [at + index.astype(jnp.uint32) for at in carry]

    # XLA for CPUs makes machine code for each index that it knows.
    indices, _ = _loop(hide, zero, 1, [np.uint32(i) for i in range(number)])
    return [[lax.dynamic_index_in_dim(x, at, keepdims=False) for x in results] for at in indices]


def _jobs(groups: Sequence[Sequence[Work]], limit: int) -> list[list[int]]:
    """Which are computed at once: small ones, as many as have room in one block."""
    large: list[list[int]] = []
    small: list[list[int]] = [[]]
    room = limit
    for g, works in enumerate(groups):
        size = sum(work.size for work in works)
        if works[0].piece != works[0].shape or size > limit:
            large.append([g])
            continue
        if size > room:
            small.append([])
            room = limit
        small[-1].append(g)
        room -= size
    return [*large, *filter(None, small)]


def _loop(
    body: Callable[[Any, Any], Any], zero: jax.Array, number: int, carry: Any
) -> tuple[Any, jax.Array]:
    """What `body` made of `carry` from one index to the next, and a zero that is later."""

    def step(state: Any) -> Any:
        index, carry = state
        return index + 1, body(index, carry)

    end, made = lax.while_loop(lambda state: state[0] < zero + number, step, (zero, carry))
    return made, end - number


def _varying(x: Any, index: Any) -> Any:
    """The same, of which the compiler does not know that it is the same in every iteration.

    What depends on none, like squares of gradients and noise, it would compute before the loops,
    and hold for all leaves.
    """
    # One by one: what passes a barrier together varies, under `shard_map`, over the same axes.
    return jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, index))[0], x)


def _together(works: Sequence[Work], index: Any, held: Any) -> list[list[jax.Array]]:
    """Computes whole leaves, in the only iteration of a loop."""
    made = []
    for work, olds in zip(works, held, strict=True):
        kept = iter(olds)
        values = [
            fetched(next(kept) if operand.is_result else _varying(operand.value, index))
            for operand in work.operands
        ]
        # The index is 0, which the compiler does not know: noise of known indices it would store.
        origin = (index, *(0 for _ in work.shape[1:])) if work.shape else ()
        new = work.body(_varying(work.numbers, index), Piece(work.shape, origin), values)
        made.append([placed_like(x, old) for x, old in zip(new, olds, strict=True)])
    return made


def _loop_of_blocks(
    work: Work, held: list[jax.Array], zero: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The loop over the blocks of a leaf. What lies on the host is fetched one block ahead."""
    slots = [operand for operand in work.operands if operand.is_result]
    is_ahead = [is_on_host(operand.value) for operand in slots]

    def body(index: Any, carry: Any) -> Any:
        held, ready = carry
        piece, starts = _piece(work, index)
        ahead, kept = iter(ready), iter(held)
        values = []
        for operand in work.operands:
            whole = next(kept) if operand.is_result else _varying(operand.value, index)
            is_fetched = operand.is_result and is_on_host(whole)
            values.append(
                next(ahead) if is_fetched else fetched(_cut(whole, operand, work.piece, starts))
            )
        made = work.body(_varying(work.numbers, index), piece, values)
        olds = [x for x, operand in zip(values, work.operands, strict=True) if operand.is_result]
        following = _piece(work, index + 1)[1]
        both = [
            _written(slot, whole, old, new, piece, starts, following, zero)
            for slot, whole, old, new in zip(slots, held, olds, made, strict=True)
        ]
        return [whole for whole, _ in both], [ahead for _, ahead in both if ahead is not None]

    first = _piece(work, zero)[1]
    ready = [
        fetched(_cut(whole, slot, work.piece, first))
        for whole, slot, ahead in zip(held, slots, is_ahead, strict=True)
        if ahead
    ]
    (made, _), zero = _loop(body, zero, math.prod(work.counts), (held, ready))
    return made, zero


def _written(
    slot: Operand,
    whole: jax.Array,
    old: jax.Array,
    new: jax.Array,
    piece: Piece,
    starts: Sequence[Any],
    following: Sequence[Any],
    zero: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """An array with a new block; and the next block of one on the host, fetched before."""
    if slot.is_total:
        return new, None
    at = _starts(slot, starts)
    if not is_on_host(whole):
        if piece.is_new is not None:
            # By bits: XLA selects bfloat16 by way of float32.
            mask = _of_blocks(slot, piece.is_new)
            new = _floats(lax.select(mask, _integers(new), _integers(old)), new.dtype)
        return lax.dynamic_update_slice(whole, new, at), None
    # Neither may be in the way of the other, or compilers copy the whole array for each block.
    ahead = fetched(_cut(whole, slot, piece.shape, following))
    new = placed_like(_after(new, ahead, zero), whole)
    return lax.dynamic_update_slice(whole, new, at), ahead


def _piece(work: Work, index: Any) -> tuple[Piece, tuple[Any, ...]]:
    """A block by its number, and where it begins: of one type, also with numbers of 64 bits."""
    starts: list[Any] = []
    is_new = None
    for axis in reversed(range(len(work.shape))):
        size, part, count = work.shape[axis], work.piece[axis], work.counts[axis]
        if count == 1:
            starts.append(np.int32(0))
            continue
        start = index % count * part
        index = index // count
        if size % part:
            wanted, start = start, jnp.minimum(start, size - part)
            row = lax.broadcasted_iota(jnp.int32, work.piece, axis)
            is_new = row >= wanted - start
        starts.append(start)
    origin = tuple(reversed(starts))
    return Piece(work.piece, origin, is_new), origin


def _starts(operand: Operand, starts: Sequence[Any]) -> list[Any]:
    blocks = operand.blocks
    return [
        at // blocks.size if blocks is not None and axis == blocks.axis else at
        for axis, at in enumerate(starts)
    ]


def _cut(whole: jax.Array, operand: Operand, piece: Shape, starts: Sequence[Any]) -> jax.Array:
    if operand.is_total:
        return whole
    sizes = list(piece)
    if (blocks := operand.blocks) is not None:
        sizes[blocks.axis] = math.ceil(sizes[blocks.axis] / blocks.size)
    return lax.dynamic_slice(whole, _starts(operand, starts), sizes)


def _of_blocks(operand: Operand, mask: jax.Array) -> jax.Array:
    """A mask of elements as one of blocks, none of which is new in part."""
    if operand.blocks is None:
        return mask
    axis, size = operand.blocks
    return lax.slice_in_dim(mask, 0, None, stride=size, axis=axis)


def _after(x: jax.Array, earlier: jax.Array, zero: jax.Array) -> jax.Array:
    """The same bits, which cannot be there before `earlier` is; XLA on CPUs removes barriers."""
    first = lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim).reshape(())
    later = _integers(first).astype(jnp.int32) & zero
    bits = _integers(x)
    return _floats(bits ^ later.astype(bits.dtype), x.dtype)


def _integers(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))


def _floats(bits: jax.Array, dtype: Any) -> jax.Array:
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
