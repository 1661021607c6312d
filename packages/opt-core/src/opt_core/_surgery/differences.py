"""How two optimizers differ, whatever becomes of their states; see `hazards` for that."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from opt_core._description.values import TransformationDescription
from opt_core._paths import Names, path_str
from opt_core._surgery.hazards import Move, bearing_of
from opt_core._surgery.likes import like_numbers, shared_settings
from opt_core._surgery.sides import Made, Side, is_recorded, made_of, shown

INJECTED: Final = "injected"
"""The setting that names values which an enclosing transformation gives, from its state."""

_WITHOUT_EFFECT: Final = {"as_transformation"}
"""Wrappers that compute what they wrap: that one is new or gone changes nothing."""


def differences(move: Move) -> Iterator[str]:
    """Yields the differences between two optimizers as text.

    Other groups, other transformations, another order, and settings that change what an update
    does with its state: booleans (`nesterov`), and the numbers of transformations that keep a state
    and occur twice. Learning rates and lengths of windows may change.
    """
    old, new = move.old, move.new
    before, after = _by_group(old), _by_group(new)
    yield from _groups(before, after)
    for group in sorted(before.keys() & after.keys()):
        yield from _order(before[group], after[group], group)
    keepers = {leaf.transformation for side in (old, new) for leaf in side.descriptions}
    ones, others = ({made[:2] for made in _made(side)} for side in (old, new))
    for group, name in sorted(ones & others):
        numbers, _ = like_numbers(old, new, name, group, group)
        is_many = name in keepers and len(new.alike(group, name)) > 1
        if is_many and (moved := sorted((j, i) for j, i in numbers.items() if i != j)):
            renumbered = (f"`{_numbered(name, j)}` was `{_numbered(name, i)}`" for j, i in moved)
            yield f"by their settings, {', '.join(renumbered)}{inside(group)}"
        for j, i in sorted(numbers.items()):
            one, other = old.made((group, name, i)), new.made((group, name, j))
            is_told = is_many and not _is_recorded(new, other)
            yield from _settings(one, other, by_number=is_told)
    # Leaves that moved show which transformations of other groups go on.
    for was, now in dict.fromkeys(
        (made_of(old.descriptions[i]), made_of(new.descriptions[j]))
        for j, pair in enumerate(move.pairs)
        for i in pair.sources
    ):
        if was[0] != now[0]:
            is_many = max(len(old.alike(*was[:2])), len(new.alike(*now[:2]))) > 1
            is_told = is_many and not _is_recorded(new, new.made(now))
            yield from _settings(old.made(was), new.made(now), by_number=is_told)


def _is_recorded(side: Side, made: TransformationDescription) -> bool:
    """Whether the state records numbers of a transformation: pairs of leaves report changes."""
    own = side.leaves_of((made.group, made.name, made.number))
    return INJECTED in made.settings or any(is_recorded(side.descriptions[i], made) for i in own)


def _numbered(name: str, number: int) -> str:
    return shown(((), name, number))


def _made(side: Side) -> list[Made]:
    return [(made.group, made.name, made.number) for made in side.description.transformations]


def _by_group(side: Side) -> dict[Names, list[str]]:
    found: dict[Names, list[str]] = {}
    for group, name, _ in _made(side):
        members = found.setdefault(group, [])
        if name not in _WITHOUT_EFFECT:
            members.append(f"`{name}`")
    return found


def inside(group: Names) -> str:
    """Returns the group of a transformation for messages."""
    return f" in group `{path_str(group)}`" if group else ""


def _groups(before: Mapping[Names, list[str]], after: Mapping[Names, list[str]]) -> Iterator[str]:
    """Groups that are gone or new, and their transformations if no other group has the same."""
    sides = ((before, after, "gone"), (after, before, "new"))
    for one, other, word in sides:
        if named := [group for group in one if group not in other and group]:
            names = ", ".join(f"`{path_str(group)}`" for group in named)
            is_one = len(named) == 1
            yield f"group{'' if is_one else 's'} {names} {'is' if is_one else 'are'} {word}"
    for one, other, word in sides:
        for group in one:
            if group not in other and one[group] and one[group] not in other.values():
                verb = "is" if len(one[group]) == 1 else "are"
                yield f"{', '.join(one[group])} {verb} {word}{inside(group)}"


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
    """Yields changed settings that make updates use the state differently.

    Those that must not change, or only at times, are among the `refusals`.
    """
    for name in shared_settings(old, new):
        one, other = old.settings[name], new.settings[name]
        effect = bearing_of(name, old, new).effect
        if one == other or effect not in ("nothing", "initial"):
            continue
        where = f"`{name}` of `{new.name}`{inside(new.group)}"
        are_numbers = all(isinstance(x, int | float) for x in (one, other))
        is_switch = any(isinstance(x, bool) for x in (one, other))
        if (is_switch or by_number) and are_numbers:
            yield f"{where} was {one}, is {other}"
        elif is_switch:
            was = one if isinstance(one, bool) else "not a boolean"
            yield f"{where} was {was}, is {other if isinstance(other, bool) else 'not a boolean'}"
