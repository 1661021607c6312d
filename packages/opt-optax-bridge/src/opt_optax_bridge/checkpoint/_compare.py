"""Whether two optimizers are the same, and what changed."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opt_optax_bridge.checkpoint._makers import transformation_name
from opt_optax_bridge.checkpoint._schema import Names, Transformation, leaf_name

_Like = tuple[Names, str]


def changes(old: Sequence[Transformation], new: Sequence[Transformation]) -> list[str]:
    """Returns what is different between two optimizers, for people to read.

    Other transformations, another order, and settings that change what a state means: booleans
    (`nesterov`), and numbers of `MultiSteps` or where a transformation occurs twice. Learning rates
    and the like may change.

    Args:
      old: those of the checkpoint; empty if they are not known, then nothing is compared.
      new: those of the target.
    """
    if not old or not new:
        return []
    found = list(_order([_label(t) for t in old], [_label(t) for t in new]))
    before, after = _likes(old), _likes(new)
    for like in before.keys() & after.keys():
        if len(before[like]) != len(after[like]):
            continue  # said above
        if permutation(before[like], after[like]) is not None:
            continue
        for one, other in zip(before[like], after[like], strict=True):
            found += _settings(one, other, is_like_another=len(before[like]) > 1)
    return found


def occurrences(
    old: Sequence[Transformation], new: Sequence[Transformation]
) -> dict[tuple[Names, str], str]:
    """Returns which of the like transformations of the checkpoint each of the target's is.

    Two `ema` of different decay keep their states when they change places.

    Returns:
      For the group and name (`'ema#2'`) in the target the name in the checkpoint; only where these
      differ.
    """
    before, after = _likes(old), _likes(new)
    found: dict[tuple[Names, str], str] = {}
    for like in before.keys() & after.keys():
        order = permutation(before[like], after[like])
        for i, j in enumerate(order or ()):
            if i != j:
                group, base = like
                found[group, _nth(base, i)] = _nth(base, j)
    return found


def permutation(
    old: Sequence[Transformation], new: Sequence[Transformation]
) -> tuple[int, ...] | None:
    """For each of `new` the position in `old` of the one with its settings, if each has one."""
    if len(old) < 2 or len(old) != len(new):
        return None
    settings = [dict(t.settings) for t in old]
    if any(settings.count(s) > 1 for s in settings):
        return None
    try:
        found = tuple(settings.index(dict(t.settings)) for t in new)
    except ValueError:
        return None
    return found if len(set(found)) == len(found) else None


def _likes(given: Sequence[Transformation]) -> dict[_Like, list[Transformation]]:
    found: dict[_Like, list[Transformation]] = {}
    for t in given:
        found.setdefault((t.group, transformation_name(t.name)), []).append(t)
    return found


def _nth(base: str, i: int) -> str:
    return base if i == 0 else f"{base}#{i + 1}"


def _label(t: Transformation) -> str:
    return f"`{t.name}`" + (f" of group `{leaf_name(t.group)}`" if t.group else "")


def _order(old: list[str], new: list[str]) -> Iterator[str]:
    if old == new:
        return
    if Counter(old) == Counter(new):
        yield f"the order of {', '.join(old)} is now {', '.join(new)}"
        return
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        if i2 > i1:
            yield f"{', '.join(old[i1:i2])} is gone"
        if j2 > j1:
            yield f"{', '.join(new[j1:j2])} is new"


def _settings(old: Transformation, new: Transformation, *, is_like_another: bool) -> Iterator[str]:
    by_number = is_like_another or transformation_name(new.name) == "multi_steps"
    for name in old.settings.keys() & new.settings.keys():
        one, other = old.settings[name], new.settings[name]
        kinds = (bool, int, float) if by_number else (bool,)
        if one != other and isinstance(one, kinds) and isinstance(other, kinds):
            yield f"`{name}` of {_label(new)} was {one}, is {other}"


def setting(given: Sequence[Transformation], group: Names, name: str) -> Mapping[str, Any]:
    """Returns the settings of the first transformation of a name in a group, if there is one."""
    for t in given:
        if transformation_name(t.name) == name and t.group == group:
            return t.settings
    return {}
