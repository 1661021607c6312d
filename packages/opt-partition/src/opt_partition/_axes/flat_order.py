"""The leaves of a state whose path does not tell the parameter, as in a list in parameter order.

Nothing can be left out of the parameters for them: what comes after it would move up. So `init` is
evaluated with all of them, and few times: every dimension of a parameter changes by an amount of
its own, up and down, which tells the dimension that a leaf follows, and `find_sources` the
parameter. What does not fit exactly is left to the slower probes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.probing import Prober, Shape
from opt_partition._axes.sources import FAST, Source, find_sources
from opt_partition._axes.verdicts import Verdict, Wanted
from opt_partition._trees import KeyPath


class _Probe(NamedTuple):
    """How sizes are changed: in which direction, and how many times the least amount."""

    sign: int
    times: int

    def by(self, size: int, dim: int, rank: int) -> int:
        """The change of a dimension.

        The order of two equal sizes is the one upwards and the other downwards. A size that is too
        small to shrink grows there, too, and the later its dimension the less.
        """
        if self.sign > 0:
            return self.times * (dim + 1)
        if size > 2 * rank:
            return -self.times * (dim + 1)
        return self.times * (2 * rank - dim)


_Pair = tuple[_Probe, _Probe]
# Both ways; where a threshold is in the way, twice to the other side.
_PAIRS: tuple[_Pair, ...] = (
    (_Probe(1, 1), _Probe(-1, 1)),
    (_Probe(-1, 1), _Probe(-1, 2)),
    (_Probe(1, 1), _Probe(1, 2)),
)


def _dims(shape: Shape, pair: _Pair) -> dict[tuple[int, ...], int]:
    """The dimension of a parameter by its size, as it is and in each of the probes."""
    return {
        (size, *(size + probe.by(size, dim, len(shape)) for probe in pair)): dim
        for dim, size in enumerate(shape)
    }


class _Probes:
    """The shapes of the state of all parameters, with their sizes changed; probed as needed."""

    def __init__(
        self, prober: Prober, table: Sequence[Parameter], baseline: Mapping[KeyPath, Shape]
    ) -> None:
        self._prober, self._table, self._baseline = prober, table, baseline
        self._shapes: dict[_Probe, Mapping[KeyPath, Shape]] = {}
        self._moves: dict[_Pair, Collection[tuple[int, ...]]] = {}

    def first_pair(self, leaf: Wanted) -> tuple[_Pair, list[Shape]] | None:
        """The first pair of probes that leave the rank of `leaf` as it is, and its shapes there."""
        for pair in _PAIRS:
            shapes = [self._probe(probe).get(leaf.path, ()) for probe in pair]
            if all(len(shape) == len(leaf.shape) for shape in shapes):
                return pair, shapes
        return None

    def moves(self, pair: _Pair) -> Collection[tuple[int, ...]]:
        """How the dimensions of all parameters move."""
        if pair not in self._moves:
            shapes = {parameter.shape for parameter in self._table}
            self._moves[pair] = {sizes for shape in shapes for sizes in _dims(shape, pair)}
        return self._moves[pair]

    def _probe(self, probe: _Probe) -> Mapping[KeyPath, Shape]:
        if probe not in self._shapes:

            def change(_: int, shape: Shape) -> Shape:
                return tuple(n + probe.by(n, dim, len(shape)) for dim, n in enumerate(shape))

            try:
                shapes = self._prober.shapes(range(len(self._table)), change)
            except Exception:  # it is a user's function: anything can happen
                shapes = {}
            # A leaf that comes or goes may move others up or down.
            self._shapes[probe] = shapes if len(shapes) == len(self._baseline) else {}
        return self._shapes[probe]


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
    probes = _Probes(prober, table, baseline)
    found: dict[KeyPath, tuple[Verdict, ...]] = {}
    moving = []
    for leaf in wanted:
        pair = probes.first_pair(leaf)
        if pair is not None and all(shape == leaf.shape for shape in pair[1]):
            found[leaf.path] = (Verdict(),) * len(leaf.shape)
        else:
            moving.append(leaf)
    able = [leaf.path for leaf in moving if _may_follow(leaf, probes, table)]
    sources = find_sources(prober, table, baseline, able, FAST)
    rest = []
    for leaf in moving:
        source = sources.get(leaf.path)
        verdicts = _judge(leaf, source, probes, table) if source else None
        if verdicts is not None:
            found[leaf.path] = verdicts
        else:
            rest.append(_of(leaf, source.parameter) if source else leaf)
    counting = _blocks(prober, table, wanted, found)
    rest += [_of(leaf, counting[leaf.path]) for leaf in wanted if leaf.path in counting]
    return {path: v for path, v in found.items() if path not in counting}, rest


def _of(leaf: Wanted, parameter: int) -> Wanted:
    return dataclasses.replace(leaf, parameter=parameter)


def _may_follow(leaf: Wanted, probes: _Probes, table: Sequence[Parameter]) -> bool:
    """Whether a dimension of `leaf` moves like one of some parameter."""
    found = probes.first_pair(leaf)
    if found is None:
        return False
    pair, (one, other) = found
    moves = probes.moves(pair)
    return any(sizes in moves for sizes in zip(leaf.shape, one, other, strict=True))


def _judge(
    leaf: Wanted, source: Source, probes: _Probes, table: Sequence[Parameter]
) -> tuple[Verdict, ...] | None:
    """The verdicts on a leaf whose dimensions move like some of its parameter, or not at all."""
    found = probes.first_pair(leaf)
    if found is None:
        return None
    pair, (one, other) = found
    dims = _dims(table[source.parameter].shape, pair)
    verdicts = []
    for axis, sizes in enumerate(zip(leaf.shape, one, other, strict=True)):
        if len({*sizes}) == 1:
            verdicts.append(Verdict())
        elif axis in source.axes and sizes in dims:
            verdicts.append(Verdict(dims[sizes], parameter=source.parameter))
        else:
            return None
    return tuple(verdicts)


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
