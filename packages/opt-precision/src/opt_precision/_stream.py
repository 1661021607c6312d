"""One leaf after the other, block by block, in place: temporaries are those of one block."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from opt_precision._formats import is_encoded
from opt_precision._place import (
    axis_names,
    fetched,
    is_on_host,
    local_origin,
    mapped,
    placed_like,
    resharded,
)
from opt_precision._select import Shape


class Piece(NamedTuple):
    """A block of a leaf."""

    shape: Shape  # of it
    origin: tuple[Any, ...]  # where it begins in what this device has of the leaf
    is_new: jax.Array | None = None  # `None`, or a mask of the elements that no earlier block had


# What makes one number of a block, what joins it to that of the blocks before, and to other
# devices', and what it begins with.
REDUCTIONS: Final[Mapping[str, tuple[Any, Any, Any, float]]] = {
    "reduce_max": (jnp.max, lax.max, lax.pmax, -jnp.inf),
    "reduce_min": (jnp.min, lax.min, lax.pmin, jnp.inf),
    "reduce_sum": (jnp.sum, lax.add, lax.psum, 0),
}


class Numbers(NamedTuple):
    """What the computation of a leaf needs besides its blocks."""

    values: Sequence[Any]  # in the order in which the equations take them
    keys: jax.Array | None = None  # of all noise of the step; `None` where nothing is rounded
    # Where the leaf's are among them: of the parameter, and of each leaf of the state.
    first: np.uint32 = np.uint32(0)
    # Where this device's part of the leaf begins; empty where it has all of it.
    begin: tuple[Any, ...] = ()


class Unit(NamedTuple):
    """What an array has one element for: so many elements of the leaf along an axis."""

    axis: int
    size: int


class Work(NamedTuple):
    """What is to be computed for one leaf.

    `held` and `read` are trees of encoded leaves, of arrays of the leaf's shape, both of which are
    cut into blocks, and of numbers, which are not.
    """

    shape: Shape  # of the leaf, as far as this device has it
    piece: Shape  # of a block
    held: Any  # what is replaced, block by block
    read: Any  # what is only read
    numbers: Any  # what `body` needs besides, `Numbers`
    body: Callable[[Any, Piece, Any, Any], Any]  # from numbers, block, held, read to the new held
    key: Hashable  # equal for leaves whose bodies differ in nothing but `numbers`

    @property
    def counts(self) -> Shape:
        """How many blocks there are along each axis."""
        sizes = zip(self.shape, self.piece, strict=True)
        return tuple(-(-size // max(1, part)) for size, part in sizes)

    @property
    def is_small(self) -> bool:
        """Whether it is one block, and on the device."""
        return self.shape == self.piece and not any(
            map(is_on_host, jax.tree.leaves((self.held, self.read)))
        )


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


def stream(works: Sequence[Work], limit: int, zero: jax.Array) -> tuple[list[Any], jax.Array]:
    """Computes leaves one after the other, block by block, each result in place of its source.

    Small leaves that are alike are stacked, and compiled once.
    """
    results: dict[int, Any] = {}
    for members in _groups(works, limit):
        result, zero = _loop_of_blocks(_stacked([works[k] for k in members], zero), zero)
        results |= zip(members, _parted(result, len(members), zero), strict=True)
    return [results[k] for k in range(len(works))], zero


def stream_on_mesh(
    works: Sequence[Work],
    limit: int,
    zero: jax.Array,
    mesh: Any,
    specs: Sequence[PartitionSpec],
    names: Sequence[Sequence[str]],
) -> tuple[list[Any], jax.Array]:
    """The same by each device for its part of all leaves; `names` are the primitives of totals."""
    nowhere, rows = PartitionSpec(), list(zip(works, specs, strict=True))
    trees = [[work.held for work in works], [work.read for work in works]]
    held_specs, read_specs = lies = [
        [
            jax.tree.map(lambda x: spec if x.ndim == len(spec) else nowhere, own)  # noqa: B023
            for own, spec in zip(tree, specs, strict=True)
        ]
        for tree in trees
    ]

    def parts(held: Any, read: Any, numbers: Any, zero: jax.Array) -> Any:
        begins = (local_origin(mesh, spec, work.shape) for work, spec in rows)
        local = [
            work._replace(held=h, read=r, numbers=n._replace(begin=begin))
            for work, begin, h, r, n in zip(works, begins, held, read, numbers, strict=True)
        ]
        results, zero = stream(local, limit, zero)
        return _across(names, specs, results), zero

    held, read = jax.tree.map(resharded, trees, lies)
    run = mapped(parts, mesh, (held_specs, read_specs, nowhere, nowhere), (held_specs, nowhere))
    found: tuple[list[Any], jax.Array] = run(held, read, [work.numbers for work in works], zero)
    return found


def _across(
    names: Sequence[Sequence[str]], specs: Sequence[PartitionSpec], numbers: list[Any]
) -> list[Any]:
    """Numbers of all devices: those that are alike are sent together."""
    alike: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for k, (own, spec) in enumerate(zip(names, specs, strict=False)):
        if axes := tuple(name for entry in spec for name in axis_names(entry)):
            for i, name in enumerate(own):
                alike[name, axes, numbers[k][i].dtype].append((k, i))
    for (name, axes, _), places in alike.items():
        joined = REDUCTIONS[name][2](jnp.stack([numbers[k][i] for k, i in places]), axes)
        for (k, i), number in zip(places, joined, strict=True):
            numbers[k][i] = number
    return numbers


def _groups(works: Sequence[Work], limit: int) -> list[list[int]]:
    """Small leaves whose computations differ in numbers alone, as many as make one block."""
    groups: dict[Hashable, list[list[int]]] = {}
    for k, work in enumerate(works):
        arrays, tree = jax.tree.flatten((work.held, work.read))
        types = tuple(array.dtype for array in arrays)
        key = (work.key, work.shape, tree, types) if work.is_small else object()
        alike = groups.setdefault(key, [])
        if not alike or math.prod(work.shape) * (len(alike[-1]) + 1) > limit:
            alike.append([])
        alike[-1].append(k)
    return [members for alike in groups.values() for members in alike]


def _stacked(works: Sequence[Work], zero: jax.Array) -> Work:
    """Leaves that are alike as one, which is compiled once."""
    work = works[0]
    if len(works) == 1:
        return work
    columns = list(zip(*(jax.tree.leaves(work.numbers) for work in works), strict=True))
    axes = [None if all(x is column[0] for x in column) else 0 for column in columns]
    tree = jax.tree.structure(work.numbers)
    numbers = [
        column[0] if axis is None else _stack(column)
        for column, axis in zip(columns, axes, strict=True)
    ]
    held, read = jax.tree.map(
        lambda first, *rest: _stack([_varying(first, zero), *rest]),
        *((work.held, work.read) for work in works),
    )

    def body(numbers: Any, piece: Piece, held: Any, read: Any) -> Any:
        origin = (piece.origin[0], *(0 for _ in work.shape[1:])) if work.shape else ()

        def each(numbers: Any, held: Any, read: Any) -> Any:
            own = Piece(work.shape, origin)
            return work.body(jax.tree.unflatten(tree, numbers), own, held, read)

        return jax.vmap(each, in_axes=(axes, 0, 0))(numbers, held, read)

    shape = (len(works), *work.shape)
    return Work(shape, shape, held, read, numbers, body, None)


def _stack(leaves: Sequence[Any]) -> Any:
    is_known = all(isinstance(leaf, np.generic) for leaf in leaves)
    return np.stack(leaves) if is_known else jnp.stack(leaves)


def _parted(result: Any, number: int, zero: jax.Array) -> list[Any]:
    """The results of each leaf of those that are alike."""
    if number == 1:
        return [result]

    def hide(index: Any, carry: Any) -> Any:
        return [at + index.astype(jnp.uint32) for at in carry]

    # XLA for CPUs makes machine code for each index that it knows.
    indices, _ = _loop(hide, zero, 1, [np.uint32(i) for i in range(number)])
    return [
        jax.tree.map(functools.partial(lax.dynamic_index_in_dim, index=at, keepdims=False), result)
        for at in indices
    ]


def _loop(
    body: Callable[[Any, Any], Any], zero: jax.Array, number: int, carry: Any
) -> tuple[Any, jax.Array]:
    """What `body` made of `carry` from one index to the next, and a zero that is later."""

    def step(state: Any) -> Any:
        count, index, carry = state
        return count + 1, index + 1, body(index, carry)

    # For a number of trips that it does not know, XLA asks the host before each on GPUs. A single
    # one is not to be known: without the loop, XLA would compute many leaves at the same time.
    trips = number if number > 1 else zero + number
    start = (jnp.int32(0), zero, carry)
    _, end, carry = lax.while_loop(lambda state: state[0] < trips, step, start)
    return carry, end - number


def _varying(x: Any, index: Any) -> Any:
    """The same, of which the compiler does not know that it is the same in every iteration.

    What depends on none, like squares of gradients and noise, it would compute before the loops,
    and hold for all leaves.
    """
    # One by one: what passes a barrier together varies, under `shard_map`, over the same axes.
    return jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, index))[0], x)


def _loop_of_blocks(work: Work, zero: jax.Array) -> tuple[Any, jax.Array]:
    """The loop over the blocks of a leaf. What lies on the host is fetched one block ahead."""
    number, starts = math.prod(work.counts), _piece(work, zero).origin
    arrays = zip(jax.tree.leaves(work.held), _units(work, work.held), strict=True)
    ready = [
        fetched(_cut(whole, unit, work.piece, starts)) if number > 1 and is_on_host(whole) else None
        for whole, unit in arrays
    ]

    def step(index: Any, carry: Any) -> Any:
        held, ready = carry
        return _block(work, index, held, ready, zero)

    (held, _), zero = _loop(step, zero, number, (work.held, ready))
    return held, zero


def _block(
    work: Work, index: Any, held: Any, ready: Sequence[Any], zero: Any
) -> tuple[Any, list[Any]]:
    """What is held with one block replaced, and the next block of what lies on the host."""
    piece, following = _piece(work, index), _piece(work, index + 1).origin

    def cut(whole: jax.Array, unit: Unit | None, starts: Sequence[Any]) -> jax.Array:
        return fetched(_cut(whole, unit, work.piece, starts))

    wholes, tree = jax.tree.flatten(held)
    rows = list(zip(wholes, _units(work, held), ready, strict=True))
    olds = [
        cut(whole, unit, piece.origin) if block is None else block for whole, unit, block in rows
    ]
    reads, read_tree = jax.tree.flatten(_varying(work.read, index))
    read = [
        cut(whole, unit, piece.origin)
        for whole, unit in zip(reads, _units(work, work.read), strict=True)
    ]
    new = work.body(
        _varying(work.numbers, index),
        piece,
        jax.tree.unflatten(tree, olds),
        jax.tree.unflatten(read_tree, read),
    )
    # Computed together, then written: else XLA computes each for itself, from all that it needs.
    new = lax.optimization_barrier(new)
    ahead = [None if block is None else cut(whole, unit, following) for whole, unit, block in rows]
    replaced = [
        # Neither may be in the way of the other, or compilers copy the whole array for each block.
        _written(whole, unit, old, new if later is None else _after(new, later, zero), piece)
        for (whole, unit, _), old, new, later in zip(
            rows, olds, jax.tree.leaves(new), ahead, strict=True
        )
    ]
    return jax.tree.unflatten(tree, replaced), ahead


def _written(
    whole: jax.Array, unit: Unit | None, old: jax.Array, new: jax.Array, piece: Piece
) -> jax.Array:
    """An array with a new block."""
    if unit is None:
        return placed_like(new, whole)
    if piece.is_new is not None:
        # By bits: XLA selects bfloat16 by way of float32.
        mask = lax.slice_in_dim(piece.is_new, 0, None, stride=unit.size, axis=unit.axis)
        new = _floats(lax.select(mask, _integers(new), _integers(old)), new.dtype)
    return lax.dynamic_update_slice(whole, placed_like(new, whole), _starts(unit, piece.origin))


def _piece(work: Work, index: Any) -> Piece:
    """A block by its number, and where it begins: of one type, also with numbers of 64 bits."""
    if work.piece == work.shape:
        # The index is 0, which the compiler does not know: noise of known indices it would store.
        return Piece(work.shape, (index, *(0 for _ in work.shape[1:])) if work.shape else ())
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
    return Piece(work.piece, tuple(reversed(starts)), is_new)


def _units(work: Work, tree: Any) -> list[Unit | None]:
    """How each array of a tree is cut; `None` for numbers, and where there is but one block."""
    units: list[Unit | None] = []
    for node in jax.tree.leaves(tree, is_leaf=is_encoded):
        is_cut = work.piece != work.shape and node.shape == work.shape
        units.append(Unit(0, 1) if is_cut else None)
        if is_encoded(node) and node.scale is not None:
            units.append(Unit(node.format.axis, node.format.block) if is_cut else None)
    return units


def _starts(unit: Unit, starts: Sequence[Any]) -> list[Any]:
    return [
        at // unit.size if axis == unit.axis and unit.size > 1 else at
        for axis, at in enumerate(starts)
    ]


def _cut(whole: jax.Array, unit: Unit | None, piece: Shape, starts: Sequence[Any]) -> jax.Array:
    if unit is None:
        return whole
    sizes = list(piece)
    sizes[unit.axis] = math.ceil(sizes[unit.axis] / unit.size)
    return lax.dynamic_slice(whole, _starts(unit, starts), sizes)


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
