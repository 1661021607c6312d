"""The leaves of a state whose path does not tell the parameter, as in a list in parameter order.

Nothing can be left out of the parameters for them: what comes after it would move up. So `init` is
evaluated with all of them, and few times: dimension `d` of every parameter changes by `d + 1`, up
and down, which tells the dimension that a leaf follows, and `find_sources` the parameter. What does
not fit exactly is left to the slower probes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.probing import Prober, Shape
from opt_partition._axes.sources import find_sources
from opt_partition._axes.verdicts import Verdict, Wanted
from opt_partition._trees import KeyPath

# By how much each dimension of a leaf moves, up and down.
_Moves = tuple[tuple[int, int], ...]


def difference_in_order(
    prober: Prober,
    table: Sequence[Parameter],
    wanted: Sequence[Wanted],
    baseline: Mapping[KeyPath, Shape],
) -> tuple[dict[KeyPath, tuple[Verdict, ...]], list[Wanted]]:
    """Looks at the state of all parameters.

    Args:
      prober: evaluates `init`.
      table: the parameters.
      wanted: the leaves to look at.
      baseline: the shapes of the state.

    Returns:
      The verdicts on the leaves that are clear; the others, with their parameter where it was
      found.
    """
    everything = range(len(table))
    try:
        up = prober.shapes(everything, lambda _, shape: _moved(shape, _up))
        down = prober.shapes(everything, lambda _, shape: _moved(shape, _down))
    except Exception:  # it is a user's function: anything can happen
        return {}, [*wanted]
    moves = {leaf.path: _moves(leaf, up.get(leaf.path), down.get(leaf.path)) for leaf in wanted}
    moving = [leaf.path for leaf in wanted if moves[leaf.path] != _still(leaf)]
    sources = find_sources(prober, table, everything, baseline, moving) if moving else {}
    found: dict[KeyPath, tuple[Verdict, ...]] = {}
    rest = []
    for leaf in wanted:
        owner = sources.get(leaf.path)
        verdicts = _judge(leaf, moves[leaf.path], owner, table)
        if verdicts is not None:
            found[leaf.path] = verdicts
        elif owner is None:
            rest.append(leaf)
        else:
            rest.append(dataclasses.replace(leaf, parameter=owner))
    counting = _blocks(prober, table, wanted, found)
    for leaf in wanted:
        if leaf.path in counting:
            del found[leaf.path]
            rest.append(dataclasses.replace(leaf, parameter=counting[leaf.path]))
    return found, rest


def _up(size: int, dim: int, rank: int) -> int:
    return dim + 1


def _down(size: int, dim: int, rank: int) -> int:
    """Downwards, so that the order of two equal sizes is the other one than upwards.

    A size that is as small as that grows, likewise less the later its dimension.
    """
    return -(dim + 1) if size > rank else 2 * rank - dim


def _moved(shape: Shape, by: Callable[[int, int, int], int]) -> Shape:
    return tuple(size + by(size, dim, len(shape)) for dim, size in enumerate(shape))


def _still(leaf: Wanted) -> _Moves:
    return ((0, 0),) * len(leaf.shape)


def _moves(leaf: Wanted, up: Shape | None, down: Shape | None) -> _Moves | None:
    """By how much a leaf moved; `None` where its rank is another one."""
    if up is None or down is None or not len(leaf.shape) == len(up) == len(down):
        return None
    return tuple((a - n, b - n) for n, a, b in zip(leaf.shape, up, down, strict=True))


def _judge(
    leaf: Wanted, moves: _Moves | None, owner: int | None, table: Sequence[Parameter]
) -> tuple[Verdict, ...] | None:
    """The verdicts on a leaf whose dimensions move like some of its parameter, or not at all."""
    if moves is None:
        return None
    if moves == _still(leaf):
        return (Verdict(),) * len(moves)
    if owner is None:
        return None
    shape = table[owner].shape
    by = {
        (size, _up(size, dim, len(shape)), _down(size, dim, len(shape))): dim
        for dim, size in enumerate(shape)
    }
    dims = [
        None if move == (0, 0) else by.get((size, *move), -1)
        for size, move in zip(leaf.shape, moves, strict=True)
    ]
    if -1 in dims:
        return None
    return tuple(Verdict() if dim is None else Verdict(dim, parameter=owner) for dim in dims)


def _blocks(
    prober: Prober,
    table: Sequence[Parameter],
    wanted: Sequence[Wanted],
    found: Mapping[KeyPath, tuple[Verdict, ...]],
) -> dict[KeyPath, int]:
    """The parameters of leaves with a dimension that small changes do not move, but doubling does.

    It counts blocks of something, and does not index nothing.
    """
    owners = {
        leaf.path: next((v.parameter for v in found[leaf.path] if v.parameter is not None), None)
        for leaf in wanted
        if leaf.path in found and _may_count(leaf, found[leaf.path])
    }
    followed = {path: owner for path, owner in owners.items() if owner is not None}
    if not followed:
        return {}
    try:
        doubled = prober.shapes(range(len(table)), lambda _, shape: tuple(2 * n for n in shape))
    except Exception:  # it is a user's function: anything can happen
        return {}
    return {
        leaf.path: followed[leaf.path]
        for leaf in wanted
        if leaf.path in followed and _counts(leaf, found[leaf.path], doubled.get(leaf.path, ()))
    }


def _may_count(leaf: Wanted, verdicts: Sequence[Verdict]) -> bool:
    return any(
        verdict.dim is None and size > 1 for verdict, size in zip(verdicts, leaf.shape, strict=True)
    )


def _counts(leaf: Wanted, verdicts: Sequence[Verdict], doubled: Shape) -> bool:
    return len(doubled) == len(leaf.shape) and any(
        verdict.dim is None and before != after
        for verdict, before, after in zip(verdicts, leaf.shape, doubled, strict=True)
    )
