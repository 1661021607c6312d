"""Judges leaves whose path does not identify the parameter, as in a list in parameter order.

No parameter can be left out for these leaves, since later entries would move up. `init` is
therefore evaluated with all parameters, and only a few times: every dimension of a parameter
changes by a distinct amount, up and down, which identifies the dimension that a leaf follows, and
`find_sources` identifies the parameter. Leaves that do not match exactly are left to the slower
probes.
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
    """How sizes are changed: the direction, and the multiple of the smallest amount."""

    sign: int
    times: int

    def by(self, size: int, dim: int, rank: int) -> int:
        """Returns the change of a dimension.

        The probes up and down order two equal sizes in opposite ways. A size that is too small to
        shrink grows in the probe down as well, by less for later dimensions.
        """
        if self.sign > 0:
            return self.times * (dim + 1)
        if size > 2 * rank:
            return -self.times * (dim + 1)
        return self.times * (2 * rank - dim)


_Pair = tuple[_Probe, _Probe]
# Up and down; if a threshold is crossed, twice in the other direction.
_PAIRS: tuple[_Pair, ...] = (
    (_Probe(1, 1), _Probe(-1, 1)),
    (_Probe(-1, 1), _Probe(-1, 2)),
    (_Probe(1, 1), _Probe(1, 2)),
)


def _dims(shape: Shape, pair: _Pair) -> dict[tuple[int, ...], int]:
    """Maps the sizes of a dimension, unchanged and in each probe, to the dimension."""
    return {
        (size, *(size + probe.by(size, dim, len(shape)) for probe in pair)): dim
        for dim, size in enumerate(shape)
    }


class _Probes:
    """The shapes of the state of all parameters with changed sizes; evaluated lazily."""

    def __init__(
        self, prober: Prober, table: Sequence[Parameter], baseline: Mapping[KeyPath, Shape]
    ) -> None:
        self._prober, self._table, self._baseline = prober, table, baseline
        self._shapes: dict[_Probe, Mapping[KeyPath, Shape]] = {}
        self._moves: dict[_Pair, Collection[tuple[int, ...]]] = {}

    def first_pair(self, leaf: Wanted) -> tuple[_Pair, list[Shape]] | None:
        """Returns the first pair of probes that keep the rank of `leaf`, and its shapes there."""
        for pair in _PAIRS:
            shapes = [self._probe(probe).get(leaf.path, ()) for probe in pair]
            if all(len(shape) == len(leaf.shape) for shape in shapes):
                return pair, shapes
        return None

    def moves(self, pair: _Pair) -> Collection[tuple[int, ...]]:
        """Returns how the dimensions of all parameters change."""
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
            # A leaf that appears or disappears may shift others.
            self._shapes[probe] = shapes if len(shapes) == len(self._baseline) else {}
        return self._shapes[probe]


def difference_in_order(
    prober: Prober,
    table: Sequence[Parameter],
    wanted: Sequence[Wanted],
    baseline: Mapping[KeyPath, Shape],
) -> tuple[dict[KeyPath, tuple[Verdict, ...]], list[Wanted]]:
    """Judges leaves with the state of all parameters.

    Args:
      prober: evaluates `init`.
      table: the parameters.
      wanted: the leaves to judge.
      baseline: the shapes of the state.

    Returns:
      The verdicts on the leaves with a clear result, and the other leaves, with their parameter if
      it was identified.
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
    """Whether a dimension of `leaf` changes like a dimension of some parameter."""
    found = probes.first_pair(leaf)
    if found is None:
        return False
    pair, (one, other) = found
    moves = probes.moves(pair)
    return any(sizes in moves for sizes in zip(leaf.shape, one, other, strict=True))


def _judge(
    leaf: Wanted, source: Source, probes: _Probes, table: Sequence[Parameter]
) -> tuple[Verdict, ...] | None:
    """Judges a leaf whose dimensions change like some of its parameter's, or not at all."""
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
    """Returns the parameters of leaves with a dimension that changes only when sizes double.

    Such a dimension counts blocks, so it must not be taken to index nothing.
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
