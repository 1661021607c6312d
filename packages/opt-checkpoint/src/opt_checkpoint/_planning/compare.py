"""Whether two optimizers are the same, and what changed."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from opt_core import TransformationDescription
from opt_core.state_changes import bearing_of, like_numbers, shared_settings

from opt_checkpoint._naming.schema import LeafInfo, Names, Schema, leaf_name, numbered

INJECTED: Final = "injected"
"""The setting of what `optax.inject_hyperparams` injects: it is in the state, or a schedule."""

INJECTING: Final = "inject_"
"""Begins the names of those that inject."""

_Likes = Mapping[tuple[Names, str], Mapping[int, TransformationDescription]]


def changes(old: Schema, new: Schema, pairs: Iterable[tuple[LeafInfo, LeafInfo]] = ()) -> list[str]:
    """Returns what is different between two optimizers, for people to read.

    Other groups, other transformations, another order, and settings that change what an update
    does with its state: booleans (`nesterov`), lengths of windows, and the numbers of
    transformations that keep a state and occur twice. Learning rates and the like may change.
    If a checkpoint says nothing of its optimizer, nothing is compared. Leaves that moved, in
    `pairs`, tell which transformations of other groups go on.
    """
    if old.optimizer is None or new.optimizer is None:
        return []
    before, after = _by_group(old.optimizer), _by_group(new.optimizer)
    found = list(_groups(before, after))
    for group in before.keys() & after.keys():
        found += _order(before[group], after[group], group)
    keepers = {leaf.base for leaf in (*old.leaves, *new.leaves)}
    ones, others = _likes(old.optimizer), _likes(new.optimizer)
    for like in sorted(ones.keys() & others.keys()):
        group, name = like
        numbers, _ = like_numbers([*ones[like].values()], [*others[like].values()])
        is_many = name in keepers and len(others[like]) > 1
        if is_many and (moved := [(j, i) for j, i in numbers.items() if i != j]):
            told = ", ".join(f"`{nth(name, j)}` was `{nth(name, i)}`" for j, i in sorted(moved))
            found.append(f"by their settings, {told}{inside(group)}")
        for j, i in sorted(numbers.items()):
            found += _settings(ones[like][i], others[like][j], by_number=is_many)
    elsewhere = {
        ((a.group, a.base, a.transformation), (b.group, b.base, b.transformation)): (a, b)
        for a, b in pairs
        if a.group != b.group
    }
    for one, other in elsewhere.values():
        first, second = old.transformation_of(one), new.transformation_of(other)
        if first is not None and second is not None:
            counts = len(ones[one.group, one.base]), len(others[other.group, other.base])
            found += _settings(first, second, by_number=max(counts) > 1)
    return list(dict.fromkeys(found))


def _by_group(given: Sequence[TransformationDescription]) -> dict[Names, list[str]]:
    found: dict[Names, list[str]] = {}
    for t in given:
        found.setdefault(t.group, []).append(f"`{t.name}`")
    return found


def _likes(given: Sequence[TransformationDescription]) -> _Likes:
    """By what they have in common, and their numbers."""
    found: dict[tuple[Names, str], dict[int, TransformationDescription]] = {}
    for made in sorted(given, key=lambda made: made.number):
        found.setdefault((made.group, made.name), {})[made.number] = made
    return found


def nth(name: str, number: int) -> str:
    """Returns what the leaves of a transformation are called: `'ema#2'`."""
    return numbered(TransformationDescription(name, number))


def inside(group: Names) -> str:
    """Returns where a transformation of a group is, for people to read."""
    return f" in group `{leaf_name(group)}`" if group else ""


def _groups(
    before: Mapping[Names, Sequence[str]], after: Mapping[Names, Sequence[str]]
) -> Iterator[str]:
    """Groups that are gone or new; of their transformations only those that were nowhere."""
    sides = ((before, after, "gone"), (after, before, "new"))
    for one, other, word in sides:
        if named := [group for group in one if group not in other and group]:
            names = ", ".join(f"`{leaf_name(group)}`" for group in named)
            is_one = len(named) == 1
            yield f"group{'' if is_one else 's'} {names} {'is' if is_one else 'are'} {word}"
    for one, other, word in sides:
        for group in one:
            if group not in other and not _is_among(one[group], other.values()):
                yield f"{', '.join(one[group])} is {word}{inside(group)}"


def _is_among(names: Sequence[str], others: Collection[Sequence[str]]) -> bool:
    return any(list(names) == list(other) for other in others)


def _order(old: Sequence[str], new: Sequence[str], group: Names) -> Iterator[str]:
    if old == new:
        return
    if Counter(old) == Counter(new):
        yield f"the order {', '.join(old)} is now {', '.join(new)}{inside(group)}"
        return
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        for names, word in ((old[i1:i2], "gone"), (new[j1:j2], "new")):
            if tag != "equal" and names:
                verb = "is" if len(names) == 1 else "are"
                yield f"{', '.join(names)} {verb} {word}{inside(group)}"


def _settings(
    old: TransformationDescription, new: TransformationDescription, *, by_number: bool
) -> Iterator[str]:
    """Yields the settings by which updates do something else with the state.

    What must not change at all, or only at times, is a problem of the plan, not among these.
    """
    # What is injected comes from the checkpoint.
    by_number = by_number and INJECTED not in old.settings.keys() & new.settings.keys()
    for name in shared_settings(old, new):
        one, other = old.settings[name], new.settings[name]
        effect = bearing_of(name, old, new).effect
        if one == other or effect in ("refused", "at_or_below_count", "above_count"):
            continue
        where = f"`{name}` of `{new.name}`{inside(new.group)}"
        are_numbers = all(isinstance(x, int | float) for x in (one, other))
        is_switch = any(isinstance(x, bool) for x in (one, other))
        if (is_switch or by_number) and are_numbers:
            yield f"{where} was {one}, is {other}"
        elif is_switch:
            was = one if isinstance(one, bool) else "no boolean"
            yield f"{where} was {was}, is {other if isinstance(other, bool) else 'no boolean'}"
        elif effect == "window":
            length, now = (str(x) if isinstance(x, int) else "a function" for x in (one, other))
            yield f"{where} was {length}, is {now if length != now else 'another'}"
