"""The best of all ways to shard a leaf further."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

# Touched dimensions, those of them sharded before, and the shortest shard, negated.
_Lengths = tuple[int, int, int]
# The first two, and the dimension of every mesh axis.
_Places = tuple[int, int, tuple[int, ...]]
_Value = TypeVar("_Value", _Lengths, _Places)


def best_placement(
    sizes: Sequence[int], shard: Sequence[int], before: Sequence[bool]
) -> tuple[int | None, ...]:
    """Returns the dimension of each mesh axis, in the order that `extend_over` describes.

    Dimensions take sets of mesh axes one after the other. Of all ways to have placed a set, the
    best stays the best whatever the later dimensions take, so that one way per set is enough: the
    time grows with 3 to the number of axes, not with the dimensions to that power. Sets are
    integers with a bit for each axis.

    Args:
      sizes: the sizes of the mesh axes.
      shard: the shape of what a device holds so far; no dimension of it is empty.
      before: whether each dimension is sharded already.

    Returns:
      A dimension per mesh axis; `None` where it has no place.

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
    # An axis of size 1 saves nothing, and is placed all the same.
    saved = {axes: (ways[axes], axes.bit_count()) for axes in lengths}
    highest = max(saved.values())
    most = [axes for axes in lengths if saved[axes] == highest]
    shortest = -min(lengths[axes] for axes in most)[2]

    # One dimension's shortest shard hides which of two others is longer. So places are compared
    # in a second pass, where no shard may be shorter than the shortest has to be.
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
    """Returns the least value of every set of mesh axes that the dimensions can take.

    Args:
      fitting: the sets that each dimension could take.
      start: the value of the empty set.
      add: returns a value from the one before, a dimension and the set that it takes.
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
    """The product of the sizes in a set."""
    return math.prod(size for bit, size in enumerate(sizes) if axes >> bit & 1)
