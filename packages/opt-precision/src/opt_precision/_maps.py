"""The values that eight bits stand for, in ascending order; each relative to its block's largest.

Maps of roots have no zero: where `v` is 0 and `m` is not, an update would be `m / eps`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

LEAST: Final = 1e-7
"""What stands in the place of zero in the dynamic map of `sqrt(v)`."""

COARSE: Final = 3e-5
"""First moments below this part of their block's largest are cut off in a step, not rounded.

Rounded to nearest, the largest update over seven decades is 3.2 times the exact one; cut off, 1.2
times. Rounded stochastically it is 33 times, cut off 2.2 times.
"""
LOG_STEPS: Final = 255
LOG_DECADES: Final = 7
LOG_LEAST: Final = 1e-7

Table = NDArray[np.float32]


@functools.cache
def dynamic_roots() -> Table:
    """The unsigned dynamic map of bitsandbytes, with `LEAST` in the place of its zero.

    Seven decades, each with twice as many values as the one below.
    """
    return np.asarray([LEAST, *_decades(2), 1.0], np.float32)


@functools.cache
def dynamic_magnitudes() -> Table:
    """The magnitudes of the signed dynamic map: zero, 126 values, and 1, for either sign.

    The map of bitsandbytes has 1 but no -1: a block whose largest element is negative would shrink
    whenever it is encoded. Here 1 is in the place of the largest value below it.
    """
    return np.asarray([0.0, *list(_decades(1))[:-1], 1.0], np.float32)


def _decades(first: int) -> Iterator[float]:
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, first * 2**decade + 1)
        yield from (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)


@functools.cache
def logarithmic() -> Table:
    """The values of `log8`, which are computed without a table; to the last digit or two."""
    ranks = np.arange(LOG_STEPS + 1)
    values: Table = (10.0 ** ((ranks - LOG_STEPS) * LOG_DECADES / LOG_STEPS)).astype(np.float32)
    return values


@functools.cache
def e4m3() -> Table:
    """The 127 finite magnitudes of float8_e4m3fn, relative to the largest, which is 448."""
    codes = np.arange(127, dtype=np.uint8)
    values: Table = codes.view(np.dtype(jnp.float8_e4m3fn)).astype(np.float32) / np.float32(448)
    return values


@functools.cache
def e4m3_roots() -> Table:
    """The same, with what is just below the smallest in the place of zero."""
    values = e4m3().copy()
    values[0] = 0.9 * values[1]
    return values


CELLS: Final = int(np.float32(1).view(np.uint32) >> 16) + 1


class Cells(NamedTuple):
    """What is known of a number between 0 and 1 by the upper half of its bits, which is its cell.

    Cells are so narrow that each holds one edge at most: a value of the map between the first and
    the last. Neither arithmetic nor a search decides, so the answer is the same in every program.
    All is looked up by the cell: XLA for GPUs would write an index that is used twice to memory.
    """

    below: NDArray[np.uint8]  # how many edges are at most the cell's lower end
    edge: Table  # the next edge, or infinity
    low: Table  # the value below that
    inverses: tuple[Table, Table]  # one by the gap above the edge, and by that below it


@functools.cache
def cells(table: Callable[[], Table], *, squared: bool) -> Cells:
    """The cells of a map, or of its squares."""
    values = table() * table() if squared else table()
    edges = values[1:-1]
    ends = (np.arange(CELLS + 1, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    below = np.searchsorted(edges, ends, side="right")[:-1]
    inside = np.searchsorted(edges, ends[1:], side="left") - below
    assert inside.max() <= 1, "a cell holds two edges"
    inverse = np.reciprocal(values[1:] - values[:-1])
    above = np.append(inverse[1:], np.float32(0))[below]
    edge = np.append(edges, np.float32(np.inf))[below]
    return Cells(below.astype(np.uint8), edge, values[below], (above, inverse[below]))
