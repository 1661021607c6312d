"""Identification of the parameter that a state leaf follows, from how much the leaf grows.

Every parameter has a code, and all its dimensions grow by one digit of the code at a time: by the
digit in one evaluation, by its complement in another. A dimension that grows by a digit and then by
its complement follows a single parameter: a sum of two sizes would grow by twice the base.

The first digits distinguish parameters that differ in shape or names, which takes few digits
regardless of the number of layers. Parameters of the same kind are distinguished by their order
where the digits confirm it, and by further digits where they do not.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.probing import Change, Prober, Shape
from opt_partition._trees import KeyPath, is_index, key_name

_NUMBER = re.compile(r"\d+")


class Step(NamedTuple):
    """How much sizes change: by at most `base`, up or down."""

    base: int
    sign: int


# Two evaluations distinguish 32 parameters; if going up crosses a threshold, going down may not.
FAST = (Step(32, 1), Step(32, -1))
# For sizes close to a threshold: a pair of evaluations for every bit.
CAREFUL = (Step(2, 1), Step(2, -1))


def kind_of(parameter: Parameter) -> Any:
    """Returns a key for parameters that `init` is assumed to treat alike.

    Repeated layers have the same path except for numbers.
    """
    return parameter.shape, parameter.dtype, _NUMBER.sub("#", parameter.path)


@dataclasses.dataclass(frozen=True)
class Source:
    """The parameter that a leaf follows.

    Attributes:
      parameter: its index.
      axes: the dimensions of the leaf that grow by as much as the parameter.
    """

    parameter: int
    axes: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _Codes:
    """A code for each parameter.

    Attributes:
      by_parameter: the code of each parameter.
      digits: number of digits of the codes.
      step: how a digit changes sizes.
    """

    by_parameter: Sequence[int]
    digits: int
    step: Step


class _Reading(NamedTuple):
    """The code read from a leaf, and the dimensions that carry it."""

    code: int
    axes: frozenset[int]


def find_sources(
    prober: Prober,
    table: Sequence[Parameter],
    baseline: Mapping[KeyPath, Shape],
    paths: Sequence[KeyPath],
    steps: Sequence[Step],
) -> dict[KeyPath, Source]:
    """Returns the single parameter that each of these leaves follows, if any, by path.

    Args:
      prober: evaluates `init`.
      table: the parameters.
      baseline: the shapes of the state.
      paths: the leaves to identify, in the order of the state.
      steps: how to change sizes; later ones are tried for leaves not identified by earlier ones.
    """
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, parameter in enumerate(table):
        kinds[kind_of(parameter), parameter.axes].append(index)
    found: dict[KeyPath, Source] = {}
    still: set[KeyPath] = set()
    for step in steps:
        rest = [path for path in paths if path not in found and path not in still]
        if rest:
            found |= _find(prober, [*kinds.values()], len(table), baseline, rest, step, still)
    return found


def _find(
    prober: Prober,
    kinds: Sequence[Sequence[int]],
    number: int,
    baseline: Mapping[KeyPath, Shape],
    paths: Sequence[KeyPath],
    step: Step,
    still: set[KeyPath],
) -> dict[KeyPath, Source]:
    """Returns the sources found with one step; adds leaves that do not change to `still`."""
    codes, room = _codes_of_kinds(kinds, number, step)
    read = _read(prober, codes, baseline, paths, still)
    found, unclear = _by_order(read, codes, kinds)
    if unclear:
        # Further digits, to distinguish parameters with the same code.
        ordinals = [0] * number
        for indices in kinds:
            for ordinal, index in enumerate(indices):
                ordinals[index] = ordinal // room
        further = _Codes(ordinals, _length(max(ordinals) + 1, step.base), step)
        pairs = zip(codes.by_parameter, ordinals, strict=True)
        by_pair = {pair: index for index, pair in enumerate(pairs)}
        for path, reading in _read(prober, further, baseline, unclear, still).items():
            if (pair := (read[path].code, reading.code)) in by_pair:
                found[path] = by_pair[pair]
    return {path: Source(index, read[path].axes) for path, index in found.items()}


def _length(number: int, base: int) -> int:
    """Returns the number of digits needed for `number` distinct codes."""
    digits = 1
    while base**digits < number:
        digits += 1
    return digits


def _codes_of_kinds(kinds: Sequence[Sequence[int]], number: int, step: Step) -> tuple[_Codes, int]:
    """Returns codes that distinguish kinds, and parameters of a kind as far as there is room."""
    is_single = all(len(indices) == 1 for indices in kinds)
    digits = _length(len(kinds) if is_single else 2 * len(kinds), step.base)
    room = step.base**digits // len(kinds)
    codes = [0] * number
    for kind, indices in enumerate(kinds):
        for ordinal, index in enumerate(indices):
            # The last parameter gets the last code, so that codes never read the same backwards.
            shown = room - 1 if ordinal == len(indices) - 1 >= room else ordinal % room
            codes[index] = kind + len(kinds) * shown
    return _Codes(codes, digits, step), room


def _read(
    prober: Prober,
    codes: _Codes,
    baseline: Mapping[KeyPath, Shape],
    paths: Sequence[KeyPath],
    still: set[KeyPath],
) -> dict[KeyPath, _Reading]:
    """Reads the codes of the leaves that carry one."""
    found = {path: _Reading(0, frozenset(range(len(baseline[path])))) for path in paths}
    step, everything = codes.step, range(len(codes.by_parameter))
    for place in range(codes.digits):
        weight = step.base**place
        digits = [code // weight % step.base + 1 for code in codes.by_parameter]
        complements = [step.base + 1 - digit for digit in digits]
        try:
            one, other = (
                prober.shapes(everything, _changing(by, step)) for by in (digits, complements)
            )
        except Exception:  # it is a user's function: anything can happen
            return {}
        if not len(one) == len(other) == len(baseline):
            return {}  # a leaf that appears or disappears may shift others
        still |= {path for path in found if one.get(path) == other.get(path) == baseline[path]}
        for path, (code, axes) in list(found.items()):
            shown = _digits(baseline[path], one.get(path, ()), other.get(path, ()), step)
            digit = {shown[axis] for axis in axes if axis in shown}
            if len(digit) == 1:
                code += (digit.pop() - 1) * weight
                found[path] = _Reading(code, axes.intersection(shown))
            else:
                del found[path]
    return found


def _changing(by: Sequence[int], step: Step) -> Change:
    """Returns the change of every dimension of a parameter by its number."""
    return lambda index, shape: tuple(size + _sign(size, step) * by[index] for size in shape)


def _sign(size: int, step: Step) -> int:
    """Returns the direction in which a size changes; sizes too small to shrink grow."""
    return step.sign if size > step.base else 1


def _digits(before: Shape, one: Shape, other: Shape, step: Step) -> dict[int, int]:
    """Returns the digits of dimensions that changed by a digit and then by its complement."""
    if not len(before) == len(one) == len(other):
        return {}
    digits = {}
    for axis, (size, a, b) in enumerate(zip(before, one, other, strict=True)):
        digit, complement = (_sign(size, step) * (new - size) for new in (a, b))
        if 1 <= digit <= step.base and digit + complement == step.base + 1:
            digits[axis] = digit
    return digits


def _by_order(
    read: Mapping[KeyPath, _Reading], codes: _Codes, kinds: Sequence[Sequence[int]]
) -> tuple[dict[KeyPath, int], list[KeyPath]]:
    """Identifies the parameters of leaves by code and order; returns them and the other leaves."""
    by_code: dict[int, list[int]] = defaultdict(list)
    alike: dict[int, Sequence[int]] = {}
    for indices in kinds:
        for index in indices:
            by_code[codes.by_parameter[index]].append(index)
            alike[codes.by_parameter[index]] = indices
    known = {path: by_code[code] for path, (code, _) in read.items() if code in by_code}
    found = {path: indices[0] for path, indices in known.items()}
    several = [path for path, indices in known.items() if len(indices) > 1]
    groups: dict[Any, list[KeyPath]] = defaultdict(list)
    for key, members in _lists(several).items():
        for path in members:
            groups[key, alike[read[path].code][0]].append(path)
    unclear = []
    for paths in groups.values():
        forwards = [*alike[read[paths[0]].code]]
        times = len(paths) // len(forwards)  # several times in consecutive lists
        seen = [read[path].code for path in paths]
        for order in (forwards * times, forwards[::-1] * times):
            if seen == [codes.by_parameter[index] for index in order]:
                found |= zip(paths, order, strict=True)
                break
        else:
            unclear += paths
    return found, unclear


def _lists(paths: Sequence[KeyPath]) -> dict[Any, list[KeyPath]]:
    """Groups paths into lists, each in the order of its indices.

    A list consists of paths that differ in one index only, the one that varies most.
    """
    sizes: dict[Any, int] = defaultdict(int)
    for path in paths:
        for at in _indices(path):
            sizes[at, path[:at], path[at + 1 :]] += 1
    lists: dict[Any, list[tuple[int, KeyPath]]] = defaultdict(list)
    for path in paths:
        keys = [(at, path[:at], path[at + 1 :]) for at in _indices(path)]
        key = max(keys, key=sizes.__getitem__, default=None)
        number = int(key_name(path[key[0]])) if key else 0
        lists[key or path].append((number, path))
    return {
        key: [path for _, path in sorted(members, key=operator.itemgetter(0))]
        for key, members in lists.items()
    }


def _indices(path: KeyPath) -> list[int]:
    return [at for at, key in enumerate(path) if is_index(key)]
