"""The parameter whose sizes a state leaf follows, read off how much it grows.

Every parameter has a code, and all its dimensions grow by one digit of that at a time: in one
evaluation by the digit, in another by what is left of the base. A dimension that grew by a digit,
and by its complement, follows one parameter and not several: the sum of two sizes grows by twice
the base.

Codes first tell apart what differs in shape or names, which takes few digits however many layers
there are; the parameters of one kind follow by their order, as far as the digits bear that out, and
by further digits where they do not.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.probing import Change, Prober, Shape
from opt_partition._trees import KeyPath, is_index

# Two evaluations tell as many kinds of parameters apart.
FAST = 32
# For sizes that are close to a threshold: grows by 1 or 2, and takes an evaluation pair per bit.
CAREFUL = 2

_NUMBER = re.compile(r"\d+")


def kind_of(parameter: Parameter) -> Any:
    """What parameters have in common that `init` may be taken to treat alike.

    The same layer of a stack has the same name but for numbers.
    """
    return parameter.shape, parameter.dtype, _NUMBER.sub("#", parameter.path)


@dataclasses.dataclass(frozen=True)
class _Codes:
    """A code for each parameter that is kept.

    Attributes:
      by_parameter: the code of each.
      digits: how many digits of `base` they have.
      base: the number of digits that there are.
    """

    by_parameter: Mapping[int, int]
    digits: int
    base: int


def find_sources(
    prober: Prober,
    table: Sequence[Parameter],
    kept: Sequence[int],
    baseline: Mapping[KeyPath, Shape],
    paths: Sequence[KeyPath],
    base: int = FAST,
) -> dict[KeyPath, int]:
    """Returns the one parameter that each of these leaves follows, if any, by its path.

    Args:
      prober: evaluates `init`.
      table: all parameters.
      kept: those that take part.
      baseline: the shapes of the state of those.
      paths: the leaves to look at, in the order of the state.
      base: by how much sizes may grow.
    """
    kinds: dict[Any, list[int]] = defaultdict(list)
    for index in kept:
        kinds[kind_of(table[index]), table[index].axes].append(index)
    codes, room = _codes_of_kinds([*kinds.values()], base)
    read = _read(prober, kept, codes, baseline, paths)
    found, unclear = _by_order(read, codes, kinds.values())
    if unclear:
        # The digits that remain: which of those with the same code.
        ordinals = {i: n // room for indices in kinds.values() for n, i in enumerate(indices)}
        further = _Codes(ordinals, _length(max(ordinals.values()) + 1, base), base)
        by_code = {(codes.by_parameter[index], ordinals[index]): index for index in kept}
        for path, ordinal in _read(prober, kept, further, baseline, unclear).items():
            if (read[path], ordinal) in by_code:
                found[path] = by_code[read[path], ordinal]
    return found


def _length(number: int, base: int) -> int:
    """How many digits tell so many things apart."""
    digits = 0
    while base**digits < number:
        digits += 1
    return digits


def _codes_of_kinds(kinds: Sequence[Sequence[int]], base: int) -> tuple[_Codes, int]:
    """Codes that tell kinds apart, and of one kind as many as there is room for."""
    is_single = max(map(len, kinds), default=1) == 1
    digits = _length(len(kinds) if is_single else 2 * len(kinds), base)
    room = max(base**digits // max(len(kinds), 1), 1)
    codes = {
        index: number + len(kinds) * (ordinal % room)
        for number, indices in enumerate(kinds)
        for ordinal, index in enumerate(indices)
    }
    return _Codes(codes, digits, base), room


def _read(
    prober: Prober,
    kept: Sequence[int],
    codes: _Codes,
    baseline: Mapping[KeyPath, Shape],
    paths: Sequence[KeyPath],
) -> dict[KeyPath, int]:
    """The code that each of these leaves shows, where it shows one."""
    found = dict.fromkeys(paths, 0)
    for place in range(codes.digits):
        weight = codes.base**place
        digits = {i: code // weight % codes.base + 1 for i, code in codes.by_parameter.items()}
        complements = {i: codes.base + 1 - digit for i, digit in digits.items()}
        try:
            one, other = (prober.shapes(kept, _growing(by)) for by in (digits, complements))
        except Exception:  # it is a user's function: anything can happen
            return {}
        for path in list(found):
            digit = _digit(baseline[path], one.get(path), other.get(path), codes.base)
            if digit is None:
                del found[path]
            else:
                found[path] += (digit - 1) * weight
    return found


def _growing(by: Mapping[int, int]) -> Change:
    """Makes every dimension of a parameter so much larger."""
    return lambda index, shape: tuple(size + by[index] for size in shape)


def _digit(before: Shape, one: Shape | None, other: Shape | None, base: int) -> int | None:
    """The digit by which every dimension grew that follows one parameter; `None` if none does."""
    if one is None or other is None or not len(before) == len(one) == len(other):
        return None
    digits = {
        a - size
        for size, a, b in zip(before, one, other, strict=True)
        if 1 <= a - size <= base and a - size + b - size == base + 1
    }
    return digits.pop() if len(digits) == 1 else None


def _by_order(
    read: Mapping[KeyPath, int], codes: _Codes, kinds: Iterable[Sequence[int]]
) -> tuple[dict[KeyPath, int], list[KeyPath]]:
    """The parameters of the leaves as far as code and order tell them, and the other leaves."""
    by_code: dict[int, list[int]] = defaultdict(list)
    alike: dict[int, Sequence[int]] = {}
    for indices in kinds:
        for index in indices:
            by_code[codes.by_parameter[index]].append(index)
            alike[codes.by_parameter[index]] = indices
    found = {path: by_code[c][0] for path, c in read.items() if len(by_code.get(c, ())) == 1}
    groups: dict[Any, list[KeyPath]] = defaultdict(list)
    for path, list_of in _lists([path for path in read if path not in found]).items():
        if read[path] in alike:
            groups[list_of, alike[read[path]][0]].append(path)
    unclear = []
    for paths in groups.values():
        indices = alike[read[paths[0]]]
        seen = [read[path] for path in paths]
        if seen == [codes.by_parameter[index] for index in indices]:
            found |= zip(paths, indices, strict=True)
        else:
            unclear += paths
    return found, unclear


def _lists(paths: Sequence[KeyPath]) -> dict[KeyPath, Any]:
    """For each path the list that it is in: its keys without that index which most others vary."""
    sizes: dict[Any, int] = defaultdict(int)
    for path in paths:
        for at, key in enumerate(path):
            if is_index(key):
                sizes[at, path[:at], path[at + 1 :]] += 1
    return {
        path: max(
            ((at, path[:at], path[at + 1 :]) for at, key in enumerate(path) if is_index(key)),
            key=sizes.__getitem__,
            default=path,
        )
        for path in paths
    }
