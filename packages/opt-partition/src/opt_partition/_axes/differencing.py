"""Determines the parameter dimension that a state dimension depends on by changing sizes.

`init` is evaluated abstractly with one dimension of the parameters slightly larger or smaller; see
`growth`. For leaves whose path contains that of a parameter, only one parameter of each kind is
probed, and the others are replaced by empty nodes. This may shift entries of lists, so only leaves
that keep their position are judged here; `flat_order` handles the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from opt_partition._axes.flat_order import difference_in_order
from opt_partition._axes.growth import Growths, judge
from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.probing import Prober, Shape, shapes_of
from opt_partition._axes.sources import CAREFUL, find_sources, kind_of
from opt_partition._axes.verdicts import Verdict, Wanted
from opt_partition._trees import KeyPath, children, descend, is_index

_AMOUNTS = 17  # number of distinct size changes; small, to avoid crossing thresholds

_Verdicts = dict[KeyPath, tuple[Verdict, ...]]


def difference(
    prober: Prober, table: Sequence[Parameter], wanted: Sequence[Wanted], state: Any
) -> _Verdicts:
    """Returns a verdict for every dimension of every wanted leaf.

    Args:
      prober: evaluates `init`.
      table: the parameters.
      wanted: the leaves to judge.
      state: the state of all parameters, as `jax.ShapeDtypeStruct`s.
    """
    found: _Verdicts = {}
    stands_for = _representatives(table, wanted)
    if len({*stands_for.values()}) < len(table) or any(leaf.place is not None for leaf in wanted):
        found = _difference_among_few(prober, table, stands_for, wanted, state)
    rest = [leaf for leaf in wanted if leaf.path not in found]
    if rest:
        in_order, rest = difference_in_order(prober, table, rest, shapes_of(state))
        found |= in_order
    if rest:
        found |= _difference_among_all(prober, table, rest, shapes_of(state))
    return found


def _representatives(table: Sequence[Parameter], wanted: Sequence[Wanted]) -> dict[int, int]:
    """Returns, per parameter, a representative with the same shape, dtype and kinds of leaves."""
    kinds: dict[int, list[Any]] = {index: [] for index in range(len(table))}
    is_complete = all(leaf.place is not None for leaf in wanted)
    for leaf in wanted:
        if leaf.parameter is not None and leaf.place is not None:
            kinds[leaf.parameter].append((leaf.around, leaf.shape))
    first: dict[Any, int] = {}
    return {
        index: first.setdefault((kind_of(parameter), *kinds[index]), index)
        for index, parameter in enumerate(table)
        if kinds[index] or not is_complete
    }


def _difference_among_few(
    prober: Prober,
    table: Sequence[Parameter],
    stands_for: Mapping[int, int],
    wanted: Sequence[Wanted],
    state: Any,
) -> _Verdicts:
    """Judges the leaves that can be recognised when only some parameters are kept."""
    kept = {index: number for number, index in enumerate(sorted({*stands_for.values()}))}
    try:
        small = prober.state(kept)
    except Exception:  # `init` is user code and may raise anything
        return {}
    shapes, lists = shapes_of(small), _Lists(state, small)
    there = [
        leaf for leaf in wanted if shapes.get(leaf.path) == leaf.shape and lists.are_whole(leaf)
    ]
    growths = Growths(prober, table, [*kept])
    verdicts = {leaf.path: judge(leaf, growths) for leaf in there}
    for leaf in there:
        # A leaf that changes without a parameter of its own follows an unknown parameter.
        if leaf.place is None and verdicts[leaf.path] != (Verdict(),) * len(leaf.shape):
            del verdicts[leaf.path]
    there = [leaf for leaf in there if leaf.path in verdicts]
    # The verdicts on the kept parameters apply to the others of their kind.
    said = {
        (leaf.around, leaf.shape, kind_of(table[leaf.parameter])): leaf.path
        for leaf in there
        if leaf.parameter is not None and leaf.place is not None
    }
    speakers: dict[KeyPath, KeyPath] = {}
    for leaf in wanted:
        if leaf.parameter is None or leaf.place is None or leaf.parameter in kept:
            continue
        key = leaf.around, leaf.shape, kind_of(table[leaf.parameter])
        if key in said:
            speakers[leaf.path] = said[key]
            verdicts[leaf.path] = verdicts[said[key]]
    numbers = {index: kept[other] for index, other in stands_for.items()}
    looked_at = [leaf for leaf in wanted if leaf.path in verdicts]
    misled = _confirm(prober, table, numbers, looked_at, verdicts)
    for leaf in looked_at:
        speaker = speakers.get(leaf.path, leaf.path)
        # The path is misleading, or the parameter is treated differently than its representative.
        if misled.get(speaker) is not None or (leaf.path in misled and speaker not in misled):
            del verdicts[leaf.path]
    return verdicts


class _Lists:
    """Checks whether lists of a state keep their lengths when parameters are left out."""

    def __init__(self, state: Any, small: Any) -> None:
        self._state, self._small = state, small
        self._is_whole: dict[KeyPath, bool] = {}

    def are_whole(self, leaf: Wanted) -> bool:
        """Whether `leaf` kept its position: all lists outside its parameter's path are complete."""
        start, stop = leaf.place or (0, 0)
        return all(
            self._check(leaf.path[:at])
            for at, key in enumerate(leaf.path)
            if is_index(key) and not start <= at < stop
        )

    def _check(self, path: KeyPath) -> bool:
        if path not in self._is_whole:
            lengths = {
                len(children(descend(tree, path)) or ()) for tree in (self._state, self._small)
            }
            self._is_whole[path] = len(lengths) == 1
        return self._is_whole[path]


def _difference_among_all(
    prober: Prober,
    table: Sequence[Parameter],
    wanted: Sequence[Wanted],
    baseline: Mapping[KeyPath, Shape],
) -> _Verdicts:
    kept = range(len(table))
    growths = Growths(prober, table, kept)
    verdicts = {leaf.path: judge(leaf, growths) for leaf in wanted}
    verdicts = _identify(prober, table, baseline, wanted, verdicts)
    for leaf in wanted:
        if leaf.parameter is not None:  # possibly identified by the order of the state
            verdicts[leaf.path] = _with_parameter(verdicts[leaf.path], leaf.parameter)
    numbers = {index: index for index in kept}
    for path, source in _confirm(prober, table, numbers, wanted, verdicts).items():
        if source is not None:
            verdicts[path] = _with_parameter(verdicts[path], source)
    return verdicts


def _with_parameter(verdicts: Sequence[Verdict], parameter: int) -> tuple[Verdict, ...]:
    return tuple(
        verdict if verdict.dim is None else dataclasses.replace(verdict, parameter=parameter)
        for verdict in verdicts
    )


def _identify(
    prober: Prober,
    table: Sequence[Parameter],
    baseline: Mapping[KeyPath, Shape],
    wanted: Sequence[Wanted],
    verdicts: _Verdicts,
) -> _Verdicts:
    """Identifies the parameter of leaves whose path does not determine it."""
    result = dict(verdicts)
    nameless = [
        leaf
        for leaf in wanted
        if leaf.parameter is None and any(v.dim is not None for v in verdicts[leaf.path])
    ]
    if not nameless:
        return result
    paths = [leaf.path for leaf in nameless]
    sources = find_sources(prober, table, baseline, paths, CAREFUL)
    for leaf in nameless:
        if (source := sources.get(leaf.path)) is not None:
            owner: int | None = source.parameter
        else:
            owner = _any_owner(table, leaf, verdicts[leaf.path])
        if owner is not None:
            result[leaf.path] = _with_parameter(verdicts[leaf.path], owner)
        else:
            unknown = Verdict(
                is_known=False, note="the parameter that it follows cannot be identified"
            )
            result[leaf.path] = tuple(
                verdict if verdict.dim is None else unknown for verdict in verdicts[leaf.path]
            )
    return result


def _any_owner(table: Sequence[Parameter], leaf: Wanted, verdicts: Sequence[Verdict]) -> int | None:
    """Returns the first parameter that a leaf may follow, if all candidates have equal axes."""
    candidates = leaf.candidates or range(len(table))
    able = [index for index in candidates if _fits(table[index], leaf, verdicts)]
    return able[0] if able and len({table[index].axes for index in able}) == 1 else None


def _fits(parameter: Parameter, leaf: Wanted, verdicts: Sequence[Verdict]) -> bool:
    """Whether the parameter has the dimensions that `leaf` follows, with the same sizes."""
    return all(
        verdict.dim is None or parameter.shape[verdict.dim :][:1] == (size,)
        for verdict, size in zip(verdicts, leaf.shape, strict=True)
    )


def _confirm(
    prober: Prober,
    table: Sequence[Parameter],
    numbers: Mapping[int, int],
    wanted: Sequence[Wanted],
    verdicts: _Verdicts,
) -> dict[KeyPath, int | None]:
    """Confirms, by distinct changes of all dimensions, that leaves follow their parameters.

    Args:
      prober: evaluates `init`.
      table: the parameters.
      numbers: a number per parameter; the same for parameters represented by one another.
      wanted: the leaves to check.
      verdicts: the verdicts on these leaves.

    Returns:
      The leaves that do not follow their parameter, with the only parameter that they do follow, or
      `None`.
    """
    placed = [leaf for leaf in wanted if leaf.parameter is not None]
    followers = [leaf for leaf in placed if any(v.dim is not None for v in verdicts[leaf.path])]
    if not followers or len(numbers) < 2:
        return {}
    rank = max(len(parameter.shape) for parameter in table)

    def change(index: int, shape: Shape) -> Shape:
        first = numbers.get(index, 0) * rank
        return tuple(size + 1 + (first + dim) % _AMOUNTS for dim, size in enumerate(shape))

    try:
        grown = prober.shapes(range(len(table)), change)
    except Exception:  # `init` is user code and may raise anything
        return {}
    changed = {index: change(index, table[index].shape) for index in numbers}
    others = {number: index for index, number in reversed([*numbers.items()])}.values()
    found: dict[KeyPath, int | None] = {}
    for leaf in followers:
        dims = [verdict.dim for verdict in verdicts[leaf.path]]

        def explains(index: int, leaf: Wanted = leaf, dims: Sequence[int | None] = dims) -> bool:
            """Whether the growth of `leaf` is consistent with following that parameter."""
            new = grown.get(leaf.path, ())
            return (
                _fits(table[index], leaf, verdicts[leaf.path])
                and len(new) == len(dims)
                and all(
                    dim is None or size == changed[index][dim]
                    for dim, size in zip(dims, new, strict=True)
                )
            )

        if explains(_index(leaf)):
            continue
        able = [index for index in others if explains(index)]
        found[leaf.path] = able[0] if len(able) == 1 else None
    return found


def _index(leaf: Wanted) -> int:
    assert leaf.parameter is not None, "only leaves with a place are confirmed"
    return leaf.parameter
