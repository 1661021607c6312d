"""Whether two optimizers are the same, what changed, and what may have been renamed."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from opt_core import TransformationDescription
from opt_core.state_changes import Move, Side, bearing_of, like_numbers, made_of, shared_settings

from opt_checkpoint._naming.schema import Names, leaf_name, numbered, state_path

INJECTED: Final = "injected"
"""The setting of a value that `optax.inject_hyperparams` injects: from the state or a schedule."""

INJECTING: Final = "inject_"
"""The prefix of the names of what injects."""

_WITHOUT_EFFECT: Final = {"as_transformation"}
"""Wrappers that compute what they wrap: that one is new or gone changes nothing."""


def changes(move: Move) -> Iterator[str]:
    """Yields the differences between two optimizers as text.

    Other groups, other transformations, another order, and settings that change what an update
    does with its state: booleans (`nesterov`), lengths of windows, and the numbers of
    transformations that keep a state and occur twice. Learning rates and the like may change.
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
            renumbered = (f"`{numbered(name, j)}` was `{numbered(name, i)}`" for j, i in moved)
            yield f"by their settings, {', '.join(renumbered)}{inside(group)}"
        for j, i in sorted(numbers.items()):
            one, other = old.made((group, name, i)), new.made((group, name, j))
            yield from _settings(one, other, by_number=is_many)
    # Leaves that moved show which transformations of other groups go on.
    for was, now in dict.fromkeys(
        (made_of(old.descriptions[i]), made_of(new.descriptions[j]))
        for j, pair in enumerate(move.pairs)
        for i in pair.sources
    ):
        if was[0] != now[0]:
            is_many = max(len(old.alike(*was[:2])), len(new.alike(*now[:2]))) > 1
            yield from _settings(old.made(was), new.made(now), by_number=is_many)


def _made(side: Side) -> list[tuple[Names, str, int]]:
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
    return f" in group `{leaf_name(group)}`" if group else ""


def _groups(before: Mapping[Names, list[str]], after: Mapping[Names, list[str]]) -> Iterator[str]:
    """Groups that are gone or new, and their transformations if no other group has the same."""
    sides = ((before, after, "gone"), (after, before, "new"))
    for one, other, word in sides:
        if named := [group for group in one if group not in other and group]:
            names = ", ".join(f"`{leaf_name(group)}`" for group in named)
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

    Settings that must not change, or only at times, are problems of the plan instead.
    """
    # injected values come from the checkpoint
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
            was = one if isinstance(one, bool) else "not a boolean"
            yield f"{where} was {was}, is {other if isinstance(other, bool) else 'not a boolean'}"
        elif effect == "window":
            length, now = (str(x) if isinstance(x, int) else "a function" for x in (one, other))
            yield f"{where} was {length}, is {now if length != now else 'another'}"


def suggested_renames(move: Move) -> Iterator[str]:
    """Yields the `Rename` that would keep a state instead of dropping and initialising it.

    Only if exactly one removed and one new transformation agree in fields, shapes and parameters.
    Two known transformations are not the same: Adam's moments are not Adamax's.
    """
    initial = {j for j, pair in enumerate(move.pairs) if not pair.sources and j not in move.ruled}
    gone, new = _looks(move.old, frozenset(move.dropped)), _looks(move.new, initial)
    for after, look in new.items():
        like = [old for old, other in gone.items() if other == look and old.group == after.group]
        is_one = len(like) == 1 and [*new.values()].count(look) == 1
        if is_one and "stated" not in (like[0].source, after.source):
            yield _suggestion(like[0], after)


def _looks(side: Side, chosen: Collection[int]) -> Mapping[TransformationDescription, Any]:
    """Fields, parameters and shapes of the transformations of which all leaves are chosen."""
    found = {}
    for made in side.description.transformations:
        own = side.leaves_of((made.group, made.name, made.number))
        if own and all(i in chosen for i in own):
            looks = (
                (side.descriptions[i].field, side.descriptions[i].parameter, side.leaves[i].shape)
                for i in own
            )
            found[made] = frozenset(looks)
    return found


def _suggestion(old: TransformationDescription, new: TransformationDescription) -> str:
    was, now = numbered(old.name, old.number), numbered(new.name, new.number)
    pattern = re.escape(leaf_name(state_path(new.group, now))).replace("\\#", "#") + "/(.*)"
    source = leaf_name(state_path(old.group, was)).replace("\\", "\\\\") + "/\\1"
    text = (
        f"`{now}` may be the former `{was}`: their states look the same. If so, say: "
        f"`rules=[(r'{pattern}', Rename(r'{source}'))]`"
    )
    if new.name != old.name:
        text += f", or `aliases={{'{new.name}': '{old.name}'}}` in the definition"
    return text
