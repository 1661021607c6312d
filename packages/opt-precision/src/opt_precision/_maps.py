"""The values that eight bits stand for, in ascending order; each relative to its block's largest.

Second moments are stored by their square roots, in maps without a zero: an element whose `v` is 0
while its `m` is not would make an update of `m / eps`.
"""

from __future__ import annotations

import functools
from typing import Final

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

LEAST: Final = 1e-7
"""What stands in the place of zero in the maps of `sqrt(v)`: updates are at most `m / 1e-7`."""

LOG_STEPS: Final = 255
LOG_DECADES: Final = 7

Table = NDArray[np.float32]


@functools.cache
def dynamic(*, signed: bool) -> Table:
    """The dynamic tree map of bitsandbytes: seven decades, each with twice the values of the last.

    Without a sign its zero is replaced by `LEAST`.
    """
    values = [0.0 if signed else LEAST, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (0 if signed else 1)) + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += [*means, *(-means if signed else ())]
    return np.sort(np.asarray(values)).astype(np.float32)


@functools.cache
def e4m3() -> Table:
    """The 127 finite magnitudes of float8_e4m3fn, relative to the largest, which is 448."""
    codes = np.arange(127, dtype=np.uint8)
    values: Table = codes.view(np.dtype(jnp.float8_e4m3fn)).astype(np.float32) / np.float32(448)
    return values


@functools.cache
def e4m3_without_zero() -> Table:
    """The same, with half of the smallest in the place of zero."""
    values = e4m3().copy()
    values[0] = values[1] / 2
    return values
