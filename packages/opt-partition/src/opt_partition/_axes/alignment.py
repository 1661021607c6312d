"""Matching of state dimensions to parameter dimensions by their sizes alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence


def align_shape(shape: Sequence[int], parameter: Sequence[int]) -> tuple[int | None, ...] | None:
    """Returns the unique largest order-preserving match of sizes between two shapes.

    Returns:
      For each dimension of `shape` the matching parameter dimension or `None`; `None` if the match
      is ambiguous.

    Examples:
      >>> align_shape((10, 256, 384), (256, 384)), align_shape((256,), (256, 256)) is None
      ((None, 0, 1), True)
    """
    if tuple(shape) == tuple(parameter):
        return tuple(range(len(parameter)))
    for size in range(min(len(shape), len(parameter)), -1, -1):
        ways = {
            (here, there)
            for here in itertools.combinations(range(len(shape)), size)
            for there in itertools.combinations(range(len(parameter)), size)
            if all(shape[i] == parameter[j] for i, j in zip(here, there, strict=True))
        }
        if len(ways) > 1:
            return None
        if ways:
            [(here, there)] = ways
            dims: Mapping[int, int] = dict(zip(here, there, strict=True))
            return tuple(dims.get(axis) for axis in range(len(shape)))
    return (None,) * len(shape)
