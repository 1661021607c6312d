"""Changes that must not pass silently when a state continues under another definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from opt_core._description.values import Bearing, LeafDescription, TransformationDescription
from opt_core._paths import Names, path_str
from opt_core._surgery.likes import UPDATE, setting_text, shared_settings, switched
from opt_core._surgery.pairing import Pair, Pairs, continued
from opt_core._surgery.sides import (
    TRAINED,
    Made,
    Side,
    has_window,
    is_recorded,
    made_of,
    shown,
)

_ADVICE: Final = "complete it first"
_IN_UNITS: Final = frozenset({"moment", "second_moment", "factored"})
_HELD: Final = frozenset({"accumulator", "params_copy"})


@dataclasses.dataclass(frozen=True)
class Move:
    """An old state, a new one, and which leaf comes from which.

    Attributes:
      old: the existing state.
      new: the state to make.
      pairs: one per leaf of the new state.
      ruled: positions of new leaves for which the caller has given a rule.
      let_go: positions of old leaves that a rule of the caller drops.
      idle: parameters that are no longer trained, whose open windows do not matter.
      is_asked: whether the caller has asked to discard state. The contents of an open window may
        then be lost, but not the values to which perturbed parameters (`optax.contrib.sam`) must
        return.
    """

    old: Side
    new: Side
    pairs: Sequence[Pair]
    ruled: Collection[int] = frozenset()
    let_go: Collection[int] = frozenset()
    idle: Collection[Names] = frozenset()
    is_asked: bool = False

    @property
    def dropped(self) -> list[int]:
        """The positions of the old leaves without a successor."""
        used = {i for pair in self.pairs for i in pair.sources}
        return [i for i in range(len(self.old.descriptions)) if i not in used]


class Refusal(NamedTuple):
    """A problem that no `allow` admits.

    Attributes:
      text: the problem and its reason.
      old: the position of the old leaf that would be lost, if any.
      new: the position of the new leaf that cannot be made, if any.
    """

    text: str
    old: int | None = None
    new: int | None = None


def dropped_leaves(move: Move) -> Iterator[str]:
    """Yields descriptions of the trained leaves that would be dropped."""
    paired = zip(move.new.descriptions, move.pairs, strict=True)
    notes = {(leaf.transformation, leaf.field, leaf.parameter): pair.note for leaf, pair in paired}
    for i in move.dropped:
        leaf = move.old.descriptions[i]
        if _is_trained(leaf, move.old.made(made_of(leaf)), move.old.leaves[i]):
            note = notes.get((leaf.transformation, leaf.field, leaf.parameter), "")
            of = f" of `{path_str(leaf.parameter)}`" if leaf.parameter is not None else ""
            what = f"{leaf.role.replace('_', ' ')}{of} in `{leaf.transformation}`"
            yield f"`{move.old.names[i]}`, {what}{f': {note}' if note else ''}"


def _is_trained(leaf: LeafDescription, made: TransformationDescription, old: Any) -> bool:
    """Whether training has determined a leaf; the contents of an open window do not count."""
    if leaf.role in TRAINED:
        return not has_window(made)
    is_number = leaf.role == "other" and getattr(getattr(old, "dtype", None), "kind", "") in "fcV"
    is_filler = leaf.parameter is not None and leaf.dimensions == (None,)
    return is_number and not is_filler and not is_recorded(leaf, made)


def refusals(move: Move) -> Iterator[Refusal]:
    """Yields the problems that no `allow` admits.

    They are settings that give the state its meaning, factors before moments, and open windows.
    """
    together = continued(move.old, move.new, move.pairs)
    factors: dict[str, None] = {}
    for (before, after), pairs in together.items():
        old, new = move.old.made(before), move.new.made(after)
        bearing = {**old.bearing, **new.bearing} if move.old is not move.new else ()
        for name in sorted(bearing):
            yield from map(Refusal, _refused(move, name, (old, new), pairs))
        if any(
            move.new.descriptions[j].role in _IN_UNITS and j not in move.ruled for _, j in pairs
        ):
            factors |= dict.fromkeys(_factors(move, before, after))
    yield from map(Refusal, factors)
    yield from _windows(move, together)


def earlier_changes(move: Move) -> Iterator[str]:
    """Yields changes of behaviour that no table of settings lists; see `refusals`.

    They are switches of user-defined transformations (booleans and words), changed user functions
    before moments, and other parameters for anything before moments.
    """
    for (before, after), pairs in continued(move.old, move.new, move.pairs).items():
        yield from switched(move.old.made(before), move.new.made(after))
        moments = {
            (move.old.descriptions[i].parameter, move.new.descriptions[j].parameter)
            for i, j in pairs
            if move.new.descriptions[j].role in _IN_UNITS and j not in move.ruled
        }
        if not moments:
            continue
        ones, others = (
            [made for made in side.before(which) if _learns_nothing(side, made)]
            for side, which in ((move.old, before), (move.new, after))
        )
        if [made.name for made in ones] != [made.name for made in others]:
            continue
        for old, new in zip(ones, others, strict=True):
            acts = f"`{new.name}`, which acts before `{shown(after)}`"
            if not old.passes_on and (difference := _acted_on(move, old, new, moments)):
                yield f"{acts}, acts on other parameters: {difference}"
            for name in shared_settings(old, new):
                was, now = old.settings[name], new.settings[name]
                is_code = any(isinstance(x, Mapping) and "function" in x for x in (was, now))
                is_known = bearing_of(name, old, new).effect != "nothing" or old.passes_on
                if was != now and (is_code or new.source == "types") and not is_known:
                    text, other = setting_text(was), setting_text(now)
                    other = "another" if other == text else other
                    yield f"`{name}` of {acts}, was {text}, is {other}"


def _acted_on(
    move: Move,
    old: TransformationDescription,
    new: TransformationDescription,
    moments: Collection[tuple[Names | None, Names | None]],
) -> str:
    """Describes the parameters that another mask or other labels add or remove; empty if none."""
    changed: dict[str, list[Names]] = {"gone": [], "new": []}
    # Concatenated moments belong to all parameters.
    whole = [(param, param) for param in move.old.owners.keys() & move.new.owners.keys()]
    for was, now in whole if (None, None) in moments else moments:
        if now is not None and old.acts_on(was) != new.acts_on(now):
            changed["gone" if old.acts_on(was) else "new"].append(now)
    return ", ".join(f"{len(p)} {word} (`{path_str(min(p))}`)" for word, p in changed.items() if p)


def _learns_nothing(side: Side, made: TransformationDescription) -> bool:
    own = side.leaves_of((made.group, made.name, made.number))
    return all(side.descriptions[i].role in ("count", "schedule_count") for i in own)


def bearing_of(
    name: str, old: TransformationDescription, new: TransformationDescription
) -> Bearing:
    """Returns the effect of a change of a setting; the new definition takes precedence."""
    return new.bearing.get(name) or old.bearing.get(name) or Bearing("nothing")


def _refused(
    move: Move,
    name: str,
    made: tuple[TransformationDescription, TransformationDescription],
    pairs: Pairs,
) -> Iterator[str]:
    """The problems with one setting."""
    old, new = made
    bearing = bearing_of(name, old, new)
    was, now = old.settings.get(name), new.settings.get(name)
    # A setting that the checkpoint lacks may have been the same, unless a window is open.
    is_told = (name in old.settings and name in new.settings) or name == UPDATE
    changed = f"`{name}` of `{new.name}` was {setting_text(was)}, is {setting_text(now)}"
    if bearing.effect == "refused" and is_told and was != now and not _is_ruled(move, name, pairs):
        yield (
            f"{changed}: the saved state means something else under it. Restore the "
            "setting, or, for a checkpoint, give rules for the leaves"
        )
    for i, j in pairs:
        count = (
            _count(move.old, i, bearing)
            if move.old.descriptions[i].field == bearing.count
            else None
        )
        if count is None:
            continue
        if bearing.effect == "window" and count and (why := _interrupted(name, was, now)):
            yield f"a window is open, `{move.new.names[j]}` is {count}: {why}; {_ADVICE}"


def _is_ruled(move: Move, name: str, pairs: Pairs) -> bool:
    """Whether the caller has given rules for the setting's own leaf, or for all leaves."""
    where = made_of(move.new.descriptions[pairs[0][1]])
    own = [j for j in move.new.leaves_of(where) if move.new.descriptions[j].field[-1:] == (name,)]
    return any(j in move.ruled for j in own) or all(j in move.ruled for _, j in pairs)


def _count(side: Side, i: int, bearing: Bearing) -> int | None:
    """The count that decides, such as the progress of a window; `None` if it has no value."""
    value = side.value(i)
    length = side.made(made_of(side.descriptions[i])).settings.get(bearing.modulo or "")
    return value if value is None or not isinstance(length, int) else value % max(length, 1)


def _interrupted(name: str, was: Any, now: Any) -> str:
    """Returns why a window cannot continue under another setting; empty if it can."""
    if isinstance(was, bool) or isinstance(now, bool):
        return f"`{name}` was {was}, is {now}" if was != now else ""
    if None in (was, now) or _is_opaque(was) or _is_opaque(now):
        return "it is not known whether the new definition's windows have the same length"
    if was == now:
        return ""
    before, after = (str(x) if isinstance(x, int) else "a function" for x in (was, now))
    return f"its length was {before}, is {after if before != after else 'another'}"


def _is_opaque(value: Any) -> bool:
    """Whether a setting holds something of which only the type is known."""
    if isinstance(value, Mapping):
        return any(_is_opaque(child) for name, child in value.items() if name != "function")
    if isinstance(value, tuple):
        return any(map(_is_opaque, value))
    return isinstance(value, str) and value.startswith("<")


def _factors(move: Move, before: Made, after: Made) -> Iterator[str]:
    """Factors before moments that have changed since the moments were made."""
    ones, others = (
        [made for made in side.before(which) if _keeps_nothing(side, made)]
        for side, which in ((move.old, before), (move.new, after))
    )
    # Another number or order of factors is a change of the optimizer.
    if [made.name for made in ones] != [made.name for made in others]:
        return
    for old, new in zip(ones, others, strict=True):
        for name in sorted({**old.bearing, **new.bearing}):
            was, now = old.settings.get(name), new.settings.get(name)
            is_told = name in old.settings and name in new.settings
            if is_told and was != now and bearing_of(name, old, new).effect == "refused":
                changed = f"`{name}` of `{new.name}` was {setting_text(was)}"
                yield (
                    f"{changed}, is {setting_text(now)}: what comes after it has been "
                    f"multiplied by it, such as the moments of `{shown(after)}`. Restore the "
                    "setting, or, for a checkpoint, give rules for these leaves"
                )


def _keeps_nothing(side: Side, made: TransformationDescription) -> bool:
    """Whether it keeps no state but a schedule's count, so that only its settings affect others."""
    own = side.leaves_of((made.group, made.name, made.number))
    return bool(made.bearing) and all(side.descriptions[i].role == "schedule_count" for i in own)


def _at(side: Side, which: Made) -> int:
    """The position of a transformation in its line."""
    line = [(made.group, made.name, made.number) for made in side.line(which[0])]
    return line.index(which) if which in line else 0


def _windows(move: Move, together: Iterable[tuple[Made, Made]]) -> Iterator[Refusal]:
    """Open windows of which a part would be lost or reinitialised."""
    goes_on: dict[Made, list[Made]] = {}
    for before, after in together:
        goes_on.setdefault(before, []).append(after)
    dropped = frozenset(move.dropped)
    for made in move.old.description.transformations:
        where = made.group, made.name, made.number
        bearing = next((b for b in made.bearing.values() if b.effect == "window"), None)
        own = move.old.leaves_of(where)
        at = [
            i
            for i in own
            if bearing is not None and move.old.descriptions[i].field == bearing.count
        ]
        if bearing is None or not at or not (count := _count(move.old, at[0], bearing)):
            continue
        is_open = f"a window is open, `{move.old.names[at[0]]}` is {count}"
        lost = [i for i in own if i in dropped and _waits(move, i, is_counted=at[0] not in dropped)]
        for i in [at[0]] if at[0] in dropped and not move.is_asked else lost:
            if i not in move.let_go:
                what = "its contents" if i == at[0] else f"`{move.old.names[i]}`"
                yield Refusal(f"{is_open}, and {what} would be lost; {_ADVICE}", i)
        for after in () if move.is_asked else goes_on.get(where, ()):
            for j in move.new.leaves_of(after):
                leaf = move.new.descriptions[j]
                is_held = leaf.role in _HELD and leaf.parameter is not None
                if is_held and not move.pairs[j].sources and j not in move.ruled:
                    why = f"`{move.new.names[j]}` would have only a part of it"
                    yield Refusal(f"{is_open}, and {why}; {_ADVICE}", None, j)


def _waits(move: Move, i: int, *, is_counted: bool) -> bool:
    """Whether a dropped leaf holds part of an open window."""
    leaf = move.old.descriptions[i]
    if move.is_asked or leaf.parameter in move.idle:
        return leaf.role == "params_copy"
    return is_counted and leaf.role in _HELD and leaf.parameter is not None


def switches(move: Move, origins: Mapping[Names, Sequence[Names]] | None = None) -> Iterator[str]:
    """Yields differences in behaviour from the transformations whose state is continued."""
    seen: dict[str, None] = {}
    for (before, after), pairs in continued(move.old, move.new, move.pairs).items():
        if not any(move.old.descriptions[i].role in TRAINED for i, _ in pairs):
            continue
        one, other = move.old.made(before), move.new.made(after)
        for name in sorted({*one.settings} & {*other.settings} - {*one.bearing} - {*other.bearing}):
            was, now = one.settings[name], other.settings[name]
            if was != now and isinstance(was, bool) and isinstance(now, bool):
                seen[f"`{name}` of `{shown(before)}` was {was}, is {now}"] = None
        is_open = any(
            _is_count(one, move.old.descriptions[i]) and move.old.value(i) for i, _ in pairs
        )
        if is_open and before[1:] != after[1:]:
            seen[f"a window of `{shown(before)}` is open, which is `{shown(after)}` now"] = None
        if not has_window(one):
            seen |= dict.fromkeys(_order(move, before, after))
    yield from dict.fromkeys((*seen, *earlier_changes(move)))
    yield from statistics(move, origins)


def statistics(move: Move, origins: Mapping[Names, Sequence[Names]] | None = None) -> Iterator[str]:
    """Yields sums over parameters that continue although the parameters have changed.

    Args:
      move: the pairs of leaves.
      origins: the old parameters that new ones are made of, if they differ.
    """
    for (before, after), pairs in continued(move.old, move.new, move.pairs).items():
        fields = [
            "/".join(move.new.descriptions[j].field)
            for _, j in pairs
            if _is_sum(move.new.descriptions[j])
        ]
        was = {*move.old.followed(before)}
        known = origins or {}
        now = {o for param in move.new.followed(after) for o in known.get(param, (param,))}
        if fields and was != now:
            changed = [
                f"{len(params)} {word} (`{path_str(min(params))}`)"
                for word, params in (("gone", was - now), ("new", now - was))
                if params
            ]
            names = ", ".join(f"`{field}`" for field in dict.fromkeys(fields))
            yield (
                f"{names} of `{shown(after)}` {'is' if len(fields) == 1 else 'are'} made of all "
                f"its parameters, of which {', '.join(changed)}"
            )


def _is_sum(leaf: LeafDescription) -> bool:
    return leaf.role == "statistic" and leaf.parameter is None


def _is_count(made: TransformationDescription, leaf: LeafDescription) -> bool:
    """Whether a leaf is the progress of a window."""
    return any(b.effect == "window" and b.count == leaf.field for b in made.bearing.values())


def _order(move: Move, before: Made, after: Made) -> Iterator[str]:
    """Changes in the order of transformations that affect the inputs of one."""
    old, new = _others(move.old, before), _others(move.new, after)
    name = shown(before)
    for other in sorted({*old[0], *old[1]} & {*new[0], *new[1]}):
        if (other in old[0]) != (other in new[0]):
            was, now = ("before" if other in found[0] else "after" for found in (old, new))
            yield f"`{other[0]}` acted {was} `{name}`, and acts {now} it"
    if bool(old[1]) != bool(new[1]):
        was_not, is_not = ("not " if old[1] else "", " not" if new[1] else "")
        yield f"`{name}` was {was_not}the last to act, and is{is_not} now"
    for one, others, word in ((old, new, "gone"), (new, old, "new")):
        side, group = (move.old, before[0]) if word == "gone" else (move.new, after[0])
        for other in one[0]:
            if other not in {*others[0], *others[1]} and _acts(side, group, other):
                yield f"`{other[0]}`, which acts before `{name}`, is {word}"


_Numbered = tuple[str, int]


def _others(side: Side, where: Made) -> tuple[Sequence[_Numbered], Sequence[_Numbered]]:
    """The transformations before and after one, by name and number."""
    names = [(made.name, made.number) for made in side.line(where[0])]
    at = _at(side, where)
    return names[:at], names[at + 1 :]


def _acts(side: Side, group: Names, other: _Numbered) -> bool:
    """Whether moments after a transformation would have another meaning without it."""
    return any(
        (made.name, made.number) == other and not made.passes_on for made in side.line(group)
    )
