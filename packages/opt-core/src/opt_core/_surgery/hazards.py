"""What must not happen in silence when a state goes on under another definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from opt_core._description.values import Bearing, LeafDescription, TransformationDescription
from opt_core._paths import Names
from opt_core._surgery.changes import leaf_path, listed
from opt_core._surgery.pairing import TRAINED, Made, Pair, Side, has_window, is_recorded, made_of
from opt_core._surgery.placement import value_of

_ADVICE = "go on to the end of the window first"


@dataclasses.dataclass(frozen=True)
class Move:
    """An old state, a new one, and which leaf comes from which.

    Attributes:
      old: the state that there is.
      new: the state to be made.
      pairs: one per leaf of the new state.
    """

    old: Side
    new: Side
    pairs: Sequence[Pair]

    @property
    def dropped(self) -> list[int]:
        """The positions of the old leaves that nothing takes over."""
        used = {i for pair in self.pairs for i in pair.sources}
        return [i for i in range(len(self.old.told)) if i not in used]

    def continued(self) -> Mapping[tuple[Made, Made], Sequence[int]]:
        """The transformations whose state goes on, with the positions of these leaves.

        Counts of schedules and settings that a state records are no state of it.
        """
        found: dict[tuple[Made, Made], list[int]] = {}
        for pair, leaf in zip(self.pairs, self.new.told, strict=True):
            is_free = leaf.role == "schedule_count"
            if is_free or is_recorded(leaf, self.new.made(made_of(leaf))):
                continue
            for i in pair.sources:
                found.setdefault((made_of(self.old.told[i]), made_of(leaf)), []).append(i)
        return found


def is_trained(leaf: LeafDescription, made: TransformationDescription, old: Any) -> bool:
    """Whether training has made a leaf what it is: what waits for a window's end is not that."""
    if leaf.role in TRAINED:
        return not has_window(made)
    is_number = leaf.role == "other" and getattr(getattr(old, "dtype", None), "kind", "") in "fcV"
    is_filler = leaf.parameter is not None and leaf.dimensions == (None,)
    return is_number and not is_filler and not is_recorded(leaf, made)


def dropped_leaves(move: Move) -> str:
    """Returns lines for the trained leaves that would be dropped; empty if there are none."""
    found = []
    told = zip(move.new.told, move.pairs, strict=True)
    notes = {(leaf.transformation, leaf.field, leaf.parameter): pair.note for leaf, pair in told}
    for i in move.dropped:
        leaf = move.old.told[i]
        if is_trained(leaf, move.old.made(made_of(leaf)), move.old.leaves[i]):
            note = notes.get((leaf.transformation, leaf.field, leaf.parameter), "")
            found.append(f"`{leaf_path(leaf)}`, {_what(leaf)}{f': {note}' if note else ''}")
    return listed(found)


def _what(leaf: LeafDescription) -> str:
    of = f" of `{'/'.join(leaf.parameter)}`" if leaf.parameter is not None else ""
    return f"{leaf.role.replace('_', ' ')}{of} in `{leaf.transformation}`"


def refusals(move: Move, *, is_asked: bool) -> Iterator[str]:
    """Yields what nothing admits: settings that give the state its meaning, windows that are open.

    Args:
      move: what is to be done.
      is_asked: whether it was asked for that state is lost. What waits in an open window may then
        be lost, but not the way back of parameters that are on an excursion.
    """
    for (before, after), positions in move.continued().items():
        one, other = move.old.made(before), move.new.made(after)
        bearing = {**one.bearing, **other.bearing}
        for name in sorted(bearing):
            was, now = one.settings.get(name), other.settings.get(name)
            if was != now:
                why = _refusal(move, bearing[name], one, positions, now)
                if why:
                    yield f"`{name}` of `{_shown(before)}` was {was}, is {now}: {why}"
    yield from _lost_windows(move, is_asked=is_asked)


def _refusal(
    move: Move, bearing: Bearing, one: TransformationDescription, positions: Sequence[int], now: Any
) -> str:
    if bearing.effect in ("nothing", "initial"):
        return ""
    if bearing.effect == "refused":
        return "the state would be read as something else"
    count = _count(move, bearing, one, positions)
    if count is None:
        return ""
    field = "/".join(bearing.count)
    if bearing.effect == "window":
        return f"a window is open, `{field}` is {count}; {_ADVICE}" if count else ""
    is_above = isinstance(now, int | float) and now > count
    if is_above == (bearing.effect == "at_or_below_count"):
        return ""
    return f"it must {'not ' * is_above}be above `{field}`, which is {count}"


def _count(
    move: Move, bearing: Bearing, made: TransformationDescription, positions: Iterable[int]
) -> int | None:
    """The number that decides, `None` where there are no values."""
    for i in positions:
        if move.old.told[i].field == bearing.count:
            what = f"`{leaf_path(move.old.told[i])}` has to be known"
            value = value_of(move.old.leaves[i], what)
            if value is None:
                return None
            length = made.settings.get(bearing.modulo) if bearing.modulo else None
            return int(value) % length if isinstance(length, int) and length else int(value)
    return None


def _lost_windows(move: Move, *, is_asked: bool) -> Iterator[str]:
    """Windows that are open, and of which a part is lost or made anew."""
    dropped = {made_of(move.old.told[i]): i for i in reversed(move.dropped)}
    if is_asked:
        copies = [i for i in move.dropped if move.old.told[i].role == "params_copy"]
        dropped = {made_of(move.old.told[i]): i for i in reversed(copies)}
    joined = {} if is_asked else dict(_joined(move))
    for made in move.old.description.transformations:
        where = made.group, made.name, made.number
        i = dropped.get(where, joined.get(where))
        bearings = [bearing for bearing in made.bearing.values() if bearing.effect == "window"]
        if i is None or not bearings:
            continue
        own = [k for k, leaf in enumerate(move.old.told) if made_of(leaf) == where]
        if count := _count(move, bearings[0], made, own):
            path = leaf_path(move.old.told[i])
            field = "/".join(bearings[0].count)
            what = "would be lost" if where in dropped else "would be a part of the window only"
            yield (
                f"`{_shown(where)}`: a window is open, `{field}` is {count}, and `{path}` {what}; "
                f"{_ADVICE}"
            )


def _joined(move: Move) -> Iterator[tuple[Made, int]]:
    """The old transformations that go on with parameters that were not theirs."""
    sources = {after: before for before, after in move.continued()}
    for pair, leaf in zip(move.pairs, move.new.told, strict=True):
        before = sources.get(made_of(leaf))
        if before is not None and not pair.sources and leaf.parameter is not None:
            own = (i for i, old in enumerate(move.old.told) if made_of(old) == before)
            yield before, next(own)


def switches(move: Move) -> Iterator[str]:
    """Yields how transformations act otherwise than those whose state they go on with."""
    seen: dict[str, None] = {}
    for (before, after), positions in move.continued().items():
        if not any(move.old.told[i].role in TRAINED for i in positions):
            continue
        one, other = move.old.made(before), move.new.made(after)
        for name in sorted({*one.settings} & {*other.settings} - {*one.bearing} - {*other.bearing}):
            was, now = one.settings[name], other.settings[name]
            if was != now and isinstance(was, bool) and isinstance(now, bool):
                seen[f"`{name}` of `{_shown(before)}` was {was}, is {now}"] = None
        if not has_window(one):
            seen |= dict.fromkeys(_order(move, before, after))
    yield from seen


def _order(move: Move, before: Made, after: Made) -> Iterator[str]:
    """What a transformation is given: the same kind of numbers, or others."""
    old, new = _others(move.old, before), _others(move.new, after)
    name = _shown(before)
    for other in sorted({*old[0], *old[1]} & {*new[0], *new[1]}):
        if (other in old[0]) != (other in new[0]):
            was, now = ("before" if other in found[0] else "after" for found in (old, new))
            yield f"`{other[0]}` acted {was} `{name}`, and acts {now} it"
    if bool(old[1]) != bool(new[1]):
        yield f"`{name}` was {'not ' if old[1] else ''}the last to act, and is{_isnt(new[1])} now"
    for one, others, word in ((old, new, "gone"), (new, old, "new")):
        side = move.old if word == "gone" else move.new
        for other in one[0]:
            if other not in {*others[0], *others[1]} and _acts(side, one[2], other):
                yield f"`{other[0]}`, which acts before `{name}`, is {word}"


def _isnt(others: Any) -> str:
    return " not" if others else ""


def _others(
    side: Side, where: Made
) -> tuple[Sequence[tuple[str, int]], Sequence[tuple[str, int]], Names]:
    """What acts before and after a transformation, by name and number, and its group."""
    group = where[0]
    line = [
        made for made in side.description.transformations if made.group == group[: len(made.group)]
    ]
    at = next(k for k, made in enumerate(line) if (made.group, made.name, made.number) == where)
    told = [(made.name, made.number) for made in line]
    return told[:at], told[at + 1 :], group


def _acts(side: Side, group: Names, other: tuple[str, int]) -> bool:
    """Whether moments after a transformation would mean something else without it."""
    return any(
        (made.name, made.number) == other and not made.passes_on
        for made in side.description.transformations
        if made.group == group[: len(made.group)]
    )


def _shown(made: Made) -> str:
    group, name, number = made
    return "/".join([*group, name if number == 1 else f"{name}#{number}"])
