"""One leaf after the other, block by block, in place: temporaries are those of one block."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

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

_SMALL: Final = 1 << 18
"""Leaves of at most so many elements are stacked, which takes a copy of them."""


class Block(NamedTuple):
    """A block of a leaf."""

    shape: Shape
    origin: tuple[Any, ...]  # where it begins in the leaf


class Loop(NamedTuple):
    """What is to be computed for one leaf.

    `held` and `read` are trees of arrays of the leaf's shape and of scales, both of which are cut
    into blocks, and of numbers, which are not.
    """

    key: Hashable  # what leaves have in common that may be compiled together
    shape: Shape  # of the leaf, as far as this device has it
    block: Shape  # the shape of blocks
    held: Any  # what is replaced, block by block
    read: Any  # what is only read
    numbers: Any  # what `body` needs besides
    body: Callable[[Any, Block, Any, Any], Any]  # from numbers, block, held, read to the new held
    begin: tuple[Any, ...]  # where this device's part of the leaf begins
    spec: PartitionSpec | None  # where arrays of the leaf's shape lie on a mesh


class _Span(NamedTuple):
    """Blocks of one size along an axis."""

    start: int
    size: int
    number: int


def block_shape(shape: Shape, limit: int, units: Mapping[int, int]) -> Shape:
    """The shape of blocks of at most `limit` elements, as far as whole units allow.

    Rows are cut off the leading axis; where one row is too large, each row along the next.

    Examples:
      >>> block_shape((1000, 512), 100_000, {1: 256})
      (125, 512)
      >>> block_shape((1009, 512), 100_000, {1: 256})
      (195, 512)
      >>> block_shape((4, 1024), 300, {1: 256})
      (1, 256)
    """
    block = list(shape)
    for axis, size in enumerate(shape):
        if math.prod(block) <= limit or 0 in shape:
            break
        unit = units.get(axis, 1)
        if size % unit:
            continue
        rest = math.prod(block) // size
        fits = max(unit, min(size, limit // rest // unit * unit))
        even = (
            size // count
            for count in range(-(-size // fits), 2 * size // fits + 1)
            if size % count == 0 and (size // count) % unit == 0
        )
        block[axis] = next(even, fits)
    return tuple(block)


def groups(loops: Mapping[int, Loop], limit: int) -> list[list[int]]:
    """Small leaves whose computations differ in numbers alone, as many as make one block."""
    found: dict[Hashable, list[list[int]]] = {}
    for at, loop in loops.items():
        arrays, tree = jax.tree.flatten((loop.held, loop.read))
        size = math.prod(loop.shape)
        is_small = size <= _SMALL and loop.shape == loop.block and not any(map(is_on_host, arrays))
        types = tuple(array.dtype for array in arrays)
        alike = found.setdefault((loop.key, loop.shape, tree, types) if is_small else at, [])
        if not alike or size * (len(alike[-1]) + 1) > limit:
            alike.append([])
        alike[-1].append(at)
    return [members for alike in found.values() for members in alike]


def run(loops: Sequence[Loop], zero: jax.Array) -> tuple[list[Any], jax.Array]:
    """Returns what the bodies made of what is held, and a zero that is there later.

    Several leaves are alike: they are stacked, and compiled once.
    """
    loop = loops[0] if len(loops) == 1 else _stacked(loops, zero)
    held = loop.held
    for spans in itertools.product(*map(_spans, loop.shape, loop.block)):
        held, zero = _run(loop._replace(held=held), spans, zero)
    if len(loops) == 1:
        return [held], zero
    # XLA for CPUs makes machine code for each index that it knows.
    known = [np.int32(k) for k in range(len(loops))]
    hidden, _ = _repeat(lambda index, indices: [at + index for at in indices], zero, 1, known)
    cut = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
    return [jax.tree.map(functools.partial(cut, index=at), held) for at in hidden], zero


def run_on_mesh(loops: Sequence[Loop], zero: jax.Array, mesh: Any) -> tuple[list[Any], jax.Array]:
    """The same by each device for its part; numbers get a dimension, with one for each part."""
    spec: Any = loops[0].spec
    nowhere = PartitionSpec()

    def is_cut(x: jax.Array) -> bool:
        return x.ndim == len(spec)

    def part(arrays: Any, numbers: Any, zero: jax.Array) -> Any:
        begin = local_origin(mesh, spec, loops[0].shape)
        own = [
            loop._replace(held=held, read=read, numbers=these, begin=begin)
            for loop, (held, read), these in zip(loops, arrays, numbers, strict=True)
        ]
        found, zero = run(own, zero)
        return jax.tree.map(lambda x: x if is_cut(x) else x[None], found), zero

    arrays = [(loop.held, loop.read) for loop in loops]
    specs = jax.tree.map(lambda x: spec if is_cut(x) else nowhere, arrays)
    parts = PartitionSpec(tuple(name for entry in spec for name in axis_names(entry)))
    out_specs = [jax.tree.map(lambda x: spec if is_cut(x) else parts, loop.held) for loop in loops]
    function = mapped(part, mesh, (specs, nowhere, nowhere), (out_specs, nowhere))
    numbers = [loop.numbers for loop in loops]
    found: tuple[list[Any], jax.Array] = function(
        jax.tree.map(resharded, arrays, specs), numbers, zero
    )
    return found


def _stacked(loops: Sequence[Loop], zero: jax.Array) -> Loop:
    """Leaves that are alike as one."""
    loop = loops[0]
    columns = list(zip(*(jax.tree.leaves(each.numbers) for each in loops), strict=True))
    axes = [None if all(x is column[0] for x in column) else 0 for column in columns]
    numbers = [
        column[0] if axis is None else _stack(*column)
        for column, axis in zip(columns, axes, strict=True)
    ]
    held, read = jax.tree.map(
        lambda first, *rest: _stack(_varying(first, zero), *rest),
        *((each.held, each.read) for each in loops),
    )
    tree = jax.tree.structure(loop.numbers)

    def body(numbers: Any, block: Block, held: Any, read: Any) -> Any:
        index = (block.origin[0], *(0 for _ in loop.shape[1:])) if loop.shape else ()
        own = Block(loop.shape, tuple(map(operator.add, loop.begin, index)))

        def each(numbers: Any, held: Any, read: Any) -> Any:
            return loop.body(jax.tree.unflatten(tree, numbers), own, held, read)

        return jax.vmap(each, in_axes=(axes, 0, 0))(numbers, held, read)

    shape = (len(loops), *loop.shape)
    return loop._replace(
        shape=shape,
        block=shape,
        held=held,
        read=read,
        numbers=numbers,
        body=body,
        begin=(0,) * len(shape),
    )


def _stack(*leaves: Any) -> Any:
    is_known = all(isinstance(leaf, np.generic) for leaf in leaves)
    return np.stack(leaves) if is_known else jnp.stack(leaves)


def _spans(size: int, part: int) -> list[_Span]:
    """All blocks along an axis: those of full size, and a last one that is shorter."""
    rest = size % max(1, part)
    full = _Span(0, part, size // max(1, part))
    return [full, _Span(size - rest, rest, 1)] if rest else [full]


def _run(loop: Loop, spans: Sequence[_Span], zero: jax.Array) -> tuple[Any, jax.Array]:
    """The loop over blocks of one shape. What lies on the host is fetched one block ahead."""
    number, sizes = math.prod(span.number for span in spans), tuple(span.size for span in spans)
    wholes, tree = jax.tree.flatten(loop.held)

    def is_cut(whole: jax.Array) -> bool:
        return whole.ndim == len(spans) and sizes != loop.shape

    def cut(whole: jax.Array, index: Any) -> jax.Array:
        if is_cut(whole):
            whole = lax.dynamic_slice(whole, *_window(loop, whole, sizes, _origin(spans, index)))
        return fetched(whole)

    def written(whole: jax.Array, new: jax.Array, index: Any) -> jax.Array:
        new = placed_like(new, whole)
        if not is_cut(whole):
            return new
        starts, _ = _window(loop, whole, sizes, _origin(spans, index))
        return lax.dynamic_update_slice(whole, new, starts)

    def step(index: Any, carry: Any) -> Any:
        wholes, ready = carry
        rows = list(zip(wholes, ready, strict=True))
        held = [cut(whole, index) if block is None else block for whole, block in rows]
        read = jax.tree.map(lambda whole: cut(whole, index), _varying(loop.read, index))
        origin = tuple(map(operator.add, loop.begin, _origin(spans, index)))
        new = loop.body(
            _varying(loop.numbers, index),
            Block(sizes, origin),
            jax.tree.unflatten(tree, held),
            read,
        )
        # Computed together, then written: else XLA computes each for itself, from all it needs.
        new = lax.optimization_barrier(jax.tree.leaves(new))
        ahead = [None if block is None else cut(whole, index + 1) for whole, block in rows]
        # Neither may be in the way of the other, or compilers copy the whole array for each block.
        new = [
            x if later is None else _after(x, later, zero)
            for x, later in zip(new, ahead, strict=True)
        ]
        wholes = [written(whole, x, index) for whole, x in zip(wholes, new, strict=True)]
        return wholes, ahead

    ready = [cut(whole, zero) if number > 1 and is_on_host(whole) else None for whole in wholes]
    (wholes, _), zero = _repeat(step, zero, number, (wholes, ready))
    return jax.tree.unflatten(tree, wholes), zero


def _repeat(
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


def _origin(spans: Sequence[_Span], index: Any) -> list[Any]:
    """Where a block begins: of one type, also with numbers of 64 bits."""
    if spans and all(span.number == 1 for span in spans):
        # The index is 0, which the compiler does not know: noise of known indices it would store.
        return [spans[0].start + index, *(np.int32(span.start) for span in spans[1:])]
    origin: list[Any] = []
    for start, size, count in reversed(spans):
        origin.append(np.int32(start) if count == 1 else start + index % count * size)
        index = index if count == 1 else index // count
    return origin[::-1]


def _window(
    loop: Loop, array: jax.Array, block: Shape, origin: Sequence[Any]
) -> tuple[list[Any], list[int]]:
    """Where the part of an array lies that belongs to a block; a scale is of several elements."""
    units = [size // max(1, own) for size, own in zip(loop.shape, array.shape, strict=True)]
    starts = [at if unit <= 1 else at // unit for at, unit in zip(origin, units, strict=True)]
    rows = zip(array.shape, block, units, strict=True)
    return starts, [min(own, -(-size // max(1, unit))) for own, size, unit in rows]


def _after(x: jax.Array, earlier: jax.Array, zero: jax.Array) -> jax.Array:
    """The same bits, which cannot be there before `earlier` is; XLA on CPUs removes barriers."""
    first = lax.slice(earlier, (0,) * earlier.ndim, (1,) * earlier.ndim).reshape(())
    later = _integers(first).astype(jnp.int32) & zero
    bits = _integers(x)
    later = bits ^ later.astype(bits.dtype)
    return later if later.dtype == x.dtype else lax.bitcast_convert_type(later, x.dtype)


def _integers(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, np.dtype(f"uint{8 * x.dtype.itemsize}"))
