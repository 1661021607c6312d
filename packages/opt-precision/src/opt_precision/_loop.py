"""One leaf after the other, block by block, in place: temporaries are those of one block."""

from __future__ import annotations

import functools
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


def block_shape(shape: Shape, limit: int, units: Mapping[int, int]) -> Shape:
    """The shape of blocks of at most `limit` elements, as far as whole units of one axis allow.

    That is the first axis with enough units, or else the one with most. Blocks are of equal size
    where that takes no more than twice as many.

    Examples:
      >>> block_shape((1000, 512), 100_000, {1: 256})
      (125, 512)
      >>> block_shape((1009, 512), 100_000, {1: 256})
      (195, 512)
      >>> block_shape((4, 1024), 1024, {1: 256}), block_shape((4, 1024), 300, {1: 64})
      ((1, 1024), (4, 64))
    """
    total = math.prod(shape)
    rows = [(size, units.get(axis, 1)) for axis, size in enumerate(shape)]
    counts = [size // unit if size % unit == 0 else 0 for size, unit in rows]
    if total <= limit or not any(counts):
        return shape
    enough = (axis for axis, count in enumerate(counts) if count and total // count <= limit)
    axis = next(enough, counts.index(max(counts)))
    count, most = counts[axis], max(1, limit * counts[axis] // total)
    numbers = range(-(-count // most), 2 * count // most + 1)
    size = next((count // number for number in numbers if count % number == 0), most)
    return (*shape[:axis], size * rows[axis][1], *shape[axis + 1 :])


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
    axes = (k for k, part in enumerate(loop.block) if part != loop.shape[k])
    if (axis := next(axes, None)) is None:
        loop, zero = _run(loop, 0, 0, 1, zero)
    else:  # blocks of full size, and a last one that is shorter
        number, rest = divmod(loop.shape[axis], loop.block[axis])
        loop, zero = _run(loop, axis, 0, number, zero)
        if rest:
            last = (*loop.block[:axis], rest, *loop.block[axis + 1 :])
            start = number * loop.block[axis]
            loop, zero = _run(loop._replace(block=last), axis, start, 1, zero)
    held = loop.held
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


def _run(loop: Loop, axis: int, start: int, number: int, zero: jax.Array) -> tuple[Loop, jax.Array]:
    """The loop over blocks along an axis. What lies on the host is fetched one block ahead."""
    wholes, tree = jax.tree.flatten(loop.held)

    def begin(index: Any) -> Any:
        return np.int32(start) + index * loop.block[axis]

    def is_cut(whole: jax.Array) -> bool:
        return whole.ndim == len(loop.shape) and loop.block != loop.shape

    def unit(whole: jax.Array) -> int:  # how many elements a scale is of
        return max(1, loop.shape[axis] // max(1, whole.shape[axis]))

    def cut(whole: jax.Array, index: Any) -> jax.Array:
        if is_cut(whole):
            of = unit(whole)
            size = loop.block[axis] // of
            whole = lax.dynamic_slice_in_dim(whole, begin(index) // of, size, axis)
        return fetched(whole)

    def written(whole: jax.Array, new: jax.Array, index: Any) -> jax.Array:
        new = placed_like(new, whole)
        if not is_cut(whole):
            return new
        return lax.dynamic_update_slice_in_dim(whole, new, begin(index) // unit(whole), axis)

    def step(index: Any, carry: Any) -> Any:
        wholes, ready = carry
        rows = list(zip(wholes, ready, strict=True))
        held = [cut(whole, index) if block is None else block for whole, block in rows]
        read = jax.tree.map(lambda whole: cut(whole, index), _varying(loop.read, index))
        # The compiler does not know the index, also if it is 0: noise of known ones it would store.
        origin = [
            first + begin(index) if k == axis else first for k, first in enumerate(loop.begin)
        ]
        new = loop.body(
            _varying(loop.numbers, index),
            Block(loop.block, tuple(origin)),
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
    return loop._replace(held=jax.tree.unflatten(tree, wholes)), zero


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
