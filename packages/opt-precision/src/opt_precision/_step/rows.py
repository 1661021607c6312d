"""Small leaves that are alike as rows of one array, which are compiled once.

Where blocks lie along the last axis a leaf is rows of blocks, whatever its shape: matrices of many
shapes are alike, but for their noise. Where their equations use different numbers, such as trust
ratios, leaves of one shape are computed in turn.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opt_precision import _bits
from opt_precision._step.body import Data, Update
from opt_precision._step.loops import after, as_floats, as_integers, hidden, loop
from opt_precision._step.memory import is_on_host
from opt_precision._step.tasks import Task
from opt_precision._step.work import Blocks, Operand, Shape, View, Work

# Of the elements of leaves that are copied: 4 MiB of float32.
_SMALL: Final = 1 << 20
_WIDTH: Final = 256  # of rows without blocks
_T = TypeVar("_T")


def viewed(task: Task) -> View | None:
    """A task as one on rows of one width, if its leaf can be seen as such.

    Args:
      task: of a leaf that is on one device.
    """
    shape, width, unit = task.leaf.shape, _WIDTH, 1
    if task.unit is not None:
        width = unit = task.unit.size
        if task.unit.axis != len(shape) - 1 or shape[-1] % width:
            return None
    size = math.prod(shape)
    if not isinstance(task.body, Update) or not size or size % width:
        return None
    inputs = task.body.inputs
    formats = [None if x is None else dataclasses.replace(x, axis=1) for x in inputs.formats]
    body = dataclasses.replace(
        task.body, inputs=dataclasses.replace(inputs, formats=formats), strides=(width, 1)
    )
    operands = [_in_rows(operand, size // width, width) for operand in task.operands]
    types = tuple((x.value.dtype, x.value.shape[1:], x.is_result) for x in operands)
    # Numbers that differ are different arrays.
    key = body.key(), types, tuple(map(id, task.numbers))
    return View(body, operands, width, unit, key)


def _in_rows(operand: Operand, rows: int, width: int) -> Operand:
    if operand.blocks is None:
        return operand._replace(value=operand.value.reshape(rows, width))
    size = operand.blocks.size
    return operand._replace(
        value=operand.value.reshape(rows, width // size), blocks=Blocks(1, size)
    )


def batches(
    works: Sequence[Work], limit: int, key: Callable[[Work], Hashable | None]
) -> list[list[int]]:
    """Small leaves that are alike, as many together as have room, with results, in two pieces.

    Args:
      works: the leaves.
      limit: the elements of one piece.
      key: equal for those that are alike; `None` for those that are like no other.
    """
    alike: dict[Hashable, list[int]] = {}
    for k, work in enumerate(works):
        is_small = work.is_looped and work.size <= _SMALL
        if is_small and not any(is_on_host(x.value) for x in work.operands):
            alike.setdefault(key(work), []).append(k)
    alike.pop(None, None)
    found: list[list[int]] = []
    for members in alike.values():
        room = 0
        for k in members:
            work = works[k]
            size = sum(x.nbytes for x in (*work.results, *(y.value for y in work.operands)))
            if room < size:
                found.append([])
                room = 8 * limit
            found[-1].append(k)
            room -= size
    return [members for members in found if len(members) > 1]


@dataclasses.dataclass(frozen=True, eq=False)
class _Joined:
    """The computation of the rows of several leaves.

    Attributes:
      body: of each.
      shape: of all rows.
      noises: which noise it needs, as `Update.noises`.
    """

    body: Update
    shape: Shape
    noises: Sequence[int]

    def __call__(
        self, data: Data, shape: Shape | None, origin: Sequence[Any], operands: Any
    ) -> list[jax.Array]:
        """Computes a piece; the arguments are those of `Update`.

        The last operands are of each row the index of its first element in its leaf, and the keys.
        """
        piece, number = shape or self.shape, len(operands) - len(self.noises)
        own, (first, *keys) = operands[: number - 1], operands[number - 1 :]
        column = lax.broadcasted_iota(jnp.uint32, piece, 1)
        index = first + column + jnp.asarray(origin[1]).astype(jnp.uint32)

        def noise(place: int) -> jax.Array:
            return _bits.noise_at(keys[self.noises.index(place)], index)

        return self.body.compute(data, piece, own, noise)


def joined(works: Sequence[Work], zero: jax.Array) -> Work:
    """Leaves whose views are alike as one, which is not there before `zero` is.

    Args:
      works: the leaves.
      zero: see `opt_precision._step.stream.stream`.
    """
    views = [work.view for work in works if work.view is not None]
    one, data = views[0], works[0].data
    rows = [view.operands[0].value.shape[0] for view in views]
    operands = [
        own[0]._replace(value=_concatenated([after(own[0].value, zero), *_values(own[1:])]))
        for own in zip(*(view.operands for view in views), strict=True)
    ]
    noises = one.body.noises
    blocks = Blocks(1, one.width)
    ends = np.cumsum(rows).astype(np.uint32)
    row = jnp.arange(ends[-1], dtype=jnp.uint32)
    leaf = jnp.searchsorted(ends, row, side="right", method="scan_unrolled")
    begin = (row - jnp.take(ends - np.asarray(rows, np.uint32), leaf)) * np.uint32(one.width)
    first = jnp.take(np.asarray([work.data.first for work in works], np.uint32), leaf)
    keys = [jnp.take(data.keys, first + np.uint32(place)) for place in noises]
    operands += [Operand(x[:, None], blocks) for x in (begin, *keys)]
    shape = (int(ends[-1]), one.width)
    compute = _Joined(one.body, shape, noises)
    return Work(shape, operands, compute, {1: one.unit}, True, data, object())


def parted(works: Sequence[Work], made: Sequence[jax.Array], zero: jax.Array) -> list[Any]:
    """The results of each leaf of those that were joined.

    Args:
      works: the leaves.
      made: the results of all.
      zero: see `opt_precision._step.stream.stream`.
    """
    rows = [work.view.operands[0].value.shape[0] for work in works if work.view is not None]
    begins = hidden([0, *np.cumsum(rows)[:-1].tolist()], zero)
    return [
        [
            as_floats(lax.dynamic_slice_in_dim(x, begin, number), old.dtype).reshape(old.shape)
            for x, old in zip(made, work.results, strict=True)
        ]
        for work, begin, number in zip(works, begins, rows, strict=True)
    ]


def in_turn(works: Sequence[Work], zero: jax.Array) -> tuple[list[list[jax.Array]], jax.Array]:
    """Computes leaves of one shape one after the other, as rows of one array for each operand.

    Args:
      works: the leaves.
      zero: see `opt_precision._step.stream.stream`.

    Returns:
      The results of each, and a zero that is not known before.
    """
    one = works[0]
    operands = [
        _stacked([after(rows[0].value, zero), *_values(rows[1:])])
        for rows in zip(*(work.operands for work in works), strict=True)
    ]
    data = [jax.tree.leaves(work.data) for work in works]
    is_common = [all(x is y for y in rest) for x, *rest in zip(*data, strict=True)]
    tables = [
        own[0] if common else np.asarray(own) if isinstance(own[0], np.generic) else _stacked(own)
        for own, common in zip(zip(*data, strict=True), is_common, strict=True)
    ]

    def body(index: Any, made: list[jax.Array]) -> list[jax.Array]:
        row = index.astype(np.uint32)
        at = functools.partial(lax.dynamic_index_in_dim, index=row, keepdims=False)
        own = [x if common else at(x) for x, common in zip(tables, is_common, strict=True)]
        values = [
            as_floats(at(x), operand.value.dtype)
            for x, operand in zip(operands, one.operands, strict=True)
        ]
        leaf = jax.tree.unflatten(jax.tree.structure(one.data), own)
        new = one.compute(leaf, None, (0,) * len(one.shape), values)
        return [
            lax.dynamic_update_index_in_dim(x, as_integers(y), row, 0)
            for x, y in zip(made, new, strict=True)
        ]

    kept = [x for x, operand in zip(operands, one.operands, strict=True) if operand.is_result]
    end, made = loop(body, zero, len(works), kept)
    results = [
        [
            as_floats(lax.dynamic_index_in_dim(x, row, keepdims=False), old.dtype)
            for x, old in zip(made, one.results, strict=True)
        ]
        for row in hidden(range(len(works)), zero)
    ]
    return results, end - len(works)


def _values(operands: Sequence[Operand]) -> list[jax.Array]:
    return [operand.value for operand in operands]


def _concatenated(arrays: Sequence[jax.Array]) -> jax.Array:
    dtype = arrays[0].dtype
    return as_floats(lax.concatenate([as_integers(x) for x in arrays], 0), dtype)


def _stacked(arrays: Sequence[jax.Array]) -> jax.Array:
    found = lax.concatenate([as_integers(x) if x.ndim else x[None] for x in arrays], 0)
    return found.reshape(len(arrays), *arrays[0].shape)
