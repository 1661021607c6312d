"""Small leaves that are alike as rows of one array, which are compiled once.

Where blocks lie along the last axis a leaf is rows of blocks, whatever its shape: matrices of many
shapes are alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opt_precision._step.body import Update
from opt_precision._step.loops import after, as_floats, as_integers, hidden, loop
from opt_precision._step.memory import is_on_host
from opt_precision._step.tasks import Task
from opt_precision._step.work import Blocks, Operand, Shape, Work

# Of the elements of leaves that are copied: 4 MiB of float32.
SMALL: Final = 1 << 20
# The rows that are computed at once, if there are more: not fewer than a quarter of it.
_ROWS: Final = 256
_WIDTH: Final = 256  # of rows without blocks


def viewed(task: Task) -> Task | None:
    """A task on rows of one width, if its leaf can be seen as such.

    Args:
      task: of a leaf that is on one device.
    """
    shape, width = task.leaf.shape, _WIDTH
    if task.unit is not None:
        width = task.unit.size if task.unit.axis == len(shape) - 1 else 0
        width = width if shape[-1] % max(1, width) == 0 else 0
    size = math.prod(shape)
    if not task.is_cut or not 0 < size <= SMALL or not width or size % width:
        return None
    view = (size // width, width)
    inputs = task.body.inputs
    formats = [None if x is None else dataclasses.replace(x, axis=1) for x in inputs.formats]
    body: Any = dataclasses.replace(task.body, inputs=dataclasses.replace(inputs, formats=formats))
    if isinstance(body, Update):
        body = dataclasses.replace(body, strides=(width, 1))
    return task._replace(
        leaf=task.leaf._replace(shape=view),
        operands=[_viewed(operand, view) for operand in task.operands],
        body=body,
        unit=None if task.unit is None else Blocks(1, width),
    )


def _viewed(operand: Operand, view: Shape) -> Operand:
    if operand.is_total:
        return operand
    rows, width = view
    if operand.blocks is None:
        return operand._replace(value=operand.value.reshape(view))
    size = operand.blocks.size
    return operand._replace(
        value=operand.value.reshape(rows, width // size), blocks=Blocks(1, size)
    )


def rows_at_once(shape: Shape) -> int:
    """How many rows of a view are computed at once: the same for as many shapes as may be.

    Args:
      shape: of the view.
    """
    most = max(n for n in range(1, min(shape[0], _ROWS) + 1) if shape[0] % n == 0)
    return shape[0] if 4 * most < min(shape[0], _ROWS) else most


def batches(works: Sequence[Work], limit: int) -> list[list[int]]:
    """Small leaves that are alike, as many together as have room, with results, in two pieces."""
    alike: dict[Hashable, list[int]] = {}
    for k, work in enumerate(works):
        is_small = work.is_looped and work.size <= SMALL
        if is_small and not any(is_on_host(x.value) for x in work.operands):
            alike.setdefault(work.key, []).append(k)
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


def as_rows(works: Sequence[Work], zero: jax.Array) -> tuple[list[list[jax.Array]], jax.Array]:
    """Computes leaves that are alike as rows of one array for each operand and each result.

    Args:
      works: the leaves.
      zero: see `opt_precision._step.stream.stream`.

    Returns:
      The results of each, and a zero that is not known before.
    """
    one, steps = works[0], [work.steps for work in works]
    ends = np.cumsum(steps)
    leaf_of = np.repeat(np.arange(len(works), dtype=np.uint32), steps)
    row_of = one.rows * (np.arange(ends[-1]) - np.repeat(ends - steps, steps)).astype(np.uint32)
    operands = [
        _joined([after(each[0].value, zero), *(x.value for x in each[1:])])
        for each in zip(*(work.operands for work in works), strict=True)
    ]
    each = [
        1 if x.is_total else x.value.shape[0] // one.steps for x in one.operands
    ]  # rows of a step
    data = [jax.tree.leaves(work.data) for work in works]
    is_common = [all(x is y for y in rest) for x, *rest in zip(*data, strict=True)]
    tables = [
        own[0] if common else np.asarray(own) if isinstance(own[0], np.generic) else _joined(own)
        for own, common in zip(zip(*data, strict=True), is_common, strict=True)
    ]

    def body(index: Any, made: list[jax.Array]) -> list[jax.Array]:
        at = index.astype(np.uint32)
        leaf, row = (_look_up(table, at) for table in (leaf_of, row_of))
        own = [
            x if common else _look_up(x, leaf) for x, common in zip(tables, is_common, strict=True)
        ]
        results, values = iter(made), []
        for x, rows, operand in zip(operands, each, one.operands, strict=True):
            held = next(results) if operand.is_result else x
            if operand.is_total:
                values.append(_look_up(held, leaf))
                continue
            # Of the array before the loop: the other is written meanwhile.
            piece = lax.dynamic_slice_in_dim(x, at * np.uint32(rows), rows)
            values.append(as_floats(piece, operand.value.dtype))
        origin = (row, *[0] * (len(one.shape) - 1))
        leaf_data = jax.tree.unflatten(jax.tree.structure(one.data), own)
        new = one.compute(leaf_data, (one.rows, *one.shape[1:]), origin, values)
        slots = [(x, rows) for x, rows in zip(one.operands, each, strict=True) if x.is_result]
        return [
            lax.dynamic_update_slice_in_dim(
                x,
                as_integers(y[None] if slot.is_total else y),
                leaf if slot.is_total else at * np.uint32(rows),
                0,
            )
            for x, y, (slot, rows) in zip(made, new, slots, strict=True)
        ]

    kept = [x for x, operand in zip(operands, one.operands, strict=True) if operand.is_result]
    end, made = loop(body, zero, int(ends[-1]), kept)
    results = _taken(works, made, each, zero)
    return results, end - int(ends[-1])


def _taken(
    works: Sequence[Work], made: Sequence[jax.Array], each: Sequence[int], zero: jax.Array
) -> list[list[jax.Array]]:
    """The results of each leaf; where they begin is hidden, so that one function takes them all."""
    ends = np.cumsum([work.steps for work in works])
    begins = hidden([int(end) - work.steps for end, work in zip(ends, works, strict=True)], zero)
    numbers = hidden(range(len(works)), zero)
    found = []
    for work, begin, number in zip(works, begins, numbers, strict=True):
        slots = [(x, n) for x, n in zip(work.operands, each, strict=True) if x.is_result]
        own = []
        for x, (slot, rows) in zip(made, slots, strict=True):
            if slot.is_total:
                own.append(_look_up(x, number))
                continue
            piece = lax.dynamic_slice_in_dim(x, begin * np.uint32(rows), work.steps * rows)
            own.append(as_floats(piece, slot.value.dtype))
        found.append(own)
    return found


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    return lax.concatenate([as_integers(x) if x.ndim else x[None] for x in arrays], 0)


def _look_up(table: Any, index: jax.Array) -> jax.Array:
    found: jax.Array = lax.dynamic_index_in_dim(jnp.asarray(table), index, keepdims=False)
    return found
