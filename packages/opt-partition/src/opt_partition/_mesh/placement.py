"""Search for the best way to shard a leaf further."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

# Number of touched dimensions, of those sharded before, and the shortest shard, negated.
_Lengths = tuple[int, int, int]
# The first two, and the dimension of every mesh axis.
_Places = tuple[int, int, tuple[int, ...]]
_Value = TypeVar("_Value", _Lengths, _Places)


def best_placement(
    sizes: Sequence[int], shard: Sequence[int], before: Sequence[bool]
) -> tuple[int | None, ...]:
    """Returns the best dimension for each mesh axis, by the criteria of `extend_over`.

    Dynamic programming over dimensions: each takes a set of mesh axes. The best way to place a set
    remains the best whatever later dimensions take, so one way per set is kept, and the time grows
    with 3 to the power of the number of axes. Sets are integers with a bit per axis.

    Args:
      sizes: sizes of the mesh axes.
      shard: the current shard shape, without empty dimensions.
      before: whether each dimension is already sharded.

    Returns:
      A dimension per mesh axis; `None` if it cannot be placed.

    Examples:
      >>> best_placement([4, 2], [6, 4], [False, False])
      (1, 0)
    """
    ways = [_product_of(axes, sizes) for axes in range(1 << len(sizes))]
    fitting = [
        [axes for axes in range(1, len(ways)) if length % ways[axes] == 0] for length in shard
    ]

    def lengthen(value: _Lengths, dim: int, axes: int) -> _Lengths:
        touched, again, shortest = value
        return touched + 1, again + before[dim], max(shortest, -(shard[dim] // ways[axes]))

    lengths = _fill(fitting, (0, 0, -max(shard)), lengthen)
    # An axis of size 1 saves nothing, but is placed nevertheless.
    saved = {axes: (ways[axes], axes.bit_count()) for axes in lengths}
    highest = max(saved.values())
    most = [axes for axes in lengths if saved[axes] == highest]
    shortest = -min(lengths[axes] for axes in most)[2]

    # The shortest shard says nothing about the other dimensions. So places are compared in a second
    # pass, in which no shard may be shorter than the shortest one has to be.
    def place(value: _Places, dim: int, axes: int) -> _Places:
        touched, again, places = value
        after = (dim if axes >> bit & 1 else old for bit, old in enumerate(places))
        return touched + 1, again + before[dim], tuple(after)

    long = [
        [axes for axes in sets if length // ways[axes] >= shortest]
        for length, sets in zip(shard, fitting, strict=True)
    ]
    nowhere = len(shard)
    placed = _fill(long, (0, 0, (nowhere,) * len(sizes)), place)
    _, _, places = min(placed[axes] for axes in most if axes in placed)
    return tuple(None if dim == nowhere else dim for dim in places)


def _fill(
    fitting: Sequence[Sequence[int]], start: _Value, add: Callable[[_Value, int, int], _Value]
) -> dict[int, _Value]:
    """Returns the minimum value of every set of mesh axes that the dimensions can take.

    Args:
      fitting: the sets that each dimension can take.
      start: the value of the empty set.
      add: returns the new value, given the old one, a dimension and the set that it takes.
    """
    best = {0: start}
    for dim, sets in enumerate(fitting):
        for taken, value in list(best.items()):
            for axes in sets:
                if not taken & axes:
                    both, new = taken | axes, add(value, dim, axes)
                    best[both] = min(best.get(both, new), new)
    return best


def _product_of(axes: int, sizes: Sequence[int]) -> int:
    """Returns the product of the sizes in a set."""
    return math.prod(size for bit, size in enumerate(sizes) if axes >> bit & 1)
