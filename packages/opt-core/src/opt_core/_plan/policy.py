"""What a change of optimizer may do with a trained state: one policy, for surgery and restores.

===============================================================  =================
change                                                           verdict
===============================================================  =================
a transformation without trained state, behind the moments or
one that only clips, averages over a window or holds back: new,
gone, or with other numbers                                      reported
rates, decay rates, `eps`; the length of a complete window       reported
a count, a schedule or an empty window that begins               reported
another float dtype of a moment; a parameter in another group    reported
trained state without a successor                                `drop`
a moment that begins at zero for a parameter that was trained,
or at the count of other parameters                              `initialise`
another shape of the same size                                   `reshape`
another dtype of anything else                                   `cast`
moments that go on under other mathematics (`nesterov`), with
another transformation before them, or as sums over other
parameters                                                       `optimizer`
a setting that gives the saved state its meaning                 refused
the contents of an open window                                   refused
===============================================================  =================

What is refused nothing in `allow` admits; a rule that names the leaf does.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, Final

import jax.numpy as jnp

from opt_core._description import (
    Bearing,
    TransformationDescription,
    TransformationKey,
    setting_text,
)
from opt_core._plan.leaves import (
    TRAINED,
    UPDATE,
    LeafInfo,
    Side,
    has_window,
    is_around,
    like_numbers,
    shared_settings,
    state_path,
)
from opt_core._plan.plan import Problem, Setting
from opt_core._trees import Names, listed, path_str

_IN_UNITS_OF_UPDATES: Final = frozenset({"moment", "second_moment", "factored", "statistic"})
_INJECTED: Final = "injected"
"""The setting that names values which an enclosing transformation gives, from its state."""
_HELD: Final = frozenset({"accumulator", "params_copy"})
_WITHOUT_EFFECT: Final = frozenset({"as_transformation"})
"""Wrappers that compute what they wrap: that one is new or gone changes nothing."""


Pairs = Sequence[tuple[LeafInfo, LeafInfo]]
"""Leaves of the old state with those of the new one."""


@dataclasses.dataclass(frozen=True)
class Move:
    """An old state, a new one, and which leaf comes from which."""

    old: Side  # the existing state
    new: Side  # the state to make
    sources: Mapping[str, Sequence[LeafInfo]]  # by the name of each leaf of the new state
    ruled: Collection[str] = frozenset()  # new leaves for which the caller has given a rule
    let_go: Collection[str] = frozenset()  # old leaves that a rule of the caller drops
    # parameters that are no longer trained, whose open windows do not matter
    idle: Collection[Names] = frozenset()
    # whether the caller has asked to discard state. The contents of an open window may then be
    # lost, but not the values to which perturbed parameters (`optax.contrib.sam`) must return.
    discards_state: bool = False

    @functools.cached_property
    def continued(self) -> Mapping[tuple[TransformationKey, TransformationKey], Pairs]:
        """The transformations whose state goes on, old and new, with their leaves."""
        # Counts of schedules and recorded settings are not considered.
        continued: dict[Any, list[tuple[LeafInfo, LeafInfo]]] = {}
        for new in self.new.leaves.values():
            if new.role != "schedule_count" and not self.new.is_recorded(new):
                for old in self.sources[new.name]:
                    continued.setdefault((old.kept_by, new.kept_by), []).append((old, new))
        return continued

    @functools.cached_property
    def at_a_count(self) -> Mapping[TransformationKey, str]:
        """The transformations that go on at a count, where Adam does not correct zero moments."""
        # A leaf that restarts in one of them would make steps several times too long.
        counts: dict[TransformationKey, str] = {}
        for leaf in self.new.leaves.values():
            value = sources[0].value if (sources := self.sources[leaf.name]) else 0
            if leaf.role == "count" and value != 0:
                count = f"`{'/'.join(leaf.field)}` continues{f' from {value}' if value else ''}"
                counts.setdefault(leaf.kept_by, f"as `init` makes it, while {count}")
        return counts

    @functools.cached_property
    def dropped(self) -> Set[str]:
        """The old leaves without a successor."""
        used = {old.name for sources in self.sources.values() for old in sources}
        return self.old.leaves.keys() - used


def problems(move: Move) -> Iterator[Problem]:
    """Yields what stands in the way, apart from leaves that restart or have no successor."""
    obstacles: dict[Problem, None] = {}
    for (before, after), pairs in move.continued.items():
        old, new = move.old.transformation(before), move.new.transformation(after)
        obstacles |= dict.fromkeys(_of_bearing(move, old, new, pairs))
        free = [leaf for _, leaf in pairs if leaf.name not in move.ruled]
        if free and any(is_trained(move.new, leaf) for _, leaf in pairs):
            obstacles |= dict.fromkeys(_switches(old, new))
        if any(_is_in_units(move.new, leaf) for leaf in free):
            obstacles |= dict.fromkeys(_other_inputs(move, before, after))
        if text := _other_parameters(move, before, after, pairs):
            obstacles[Problem(text, "optimizer")] = None
    obstacles |= dict.fromkeys(_lost_windows(move))
    yield from obstacles


def is_trained(side: Side, leaf: LeafInfo) -> bool:
    """Whether training determines a leaf; counts and the contents of windows do not count."""
    transformation = side.keeper(leaf)
    if transformation.passes_on and leaf.parameter is None:
        return False  # what a guard has seen
    if leaf.role in TRAINED:
        return not has_window(transformation)
    if leaf.role != "other" or side.is_recorded(leaf):
        return False
    if leaf.parameter is not None:
        return leaf.dimensions != (None,)  # that stands in for a factor that does not exist
    return not leaf.is_key and bool(jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.inexact))


def begins_untrained(move: Move, leaf: LeafInfo) -> bool:
    """Whether a new leaf without a source restarts where training has gone on."""
    if move.sources[leaf.name] or leaf.name in move.ruled:
        return False
    if leaf.role == "count":
        return _is_left_by_its_count(move, leaf.kept_by)
    if not is_trained(move.new, leaf):
        return False
    if leaf.kept_by in move.at_a_count:
        return True
    if leaf.parameter is not None:
        params = [leaf.parameter]
    else:
        owners = move.new.owners.items()
        params = [param for param, owner in owners if is_around(owner, leaf.group)]
    return any(origin in move.old.owners for x in params for origin in move.new.came_from(x))


def _is_left_by_its_count(move: Move, where: TransformationKey) -> bool:
    """Whether a count begins at 0 for moments that go on: their bias would be corrected again."""
    if has_window(move.new.transformation(where)):
        return False
    return any(move.sources[x.name] for x in move.new.leaves_of(where) if is_trained(move.new, x))


def _of_bearing(
    move: Move, old: TransformationDescription, new: TransformationDescription, pairs: Pairs
) -> Iterator[Problem]:
    """Changed settings that give the saved state its meaning, and other lengths of open windows."""
    for name in sorted({**old.bearing, **new.bearing}):
        bearing = bearing_of(name, old, new)
        was, now = old.settings.get(name), new.settings.get(name)
        # A setting that the checkpoint lacks may have been the same.
        is_known = (name in old.settings and name in new.settings) or name == UPDATE
        is_redefined = bearing.effect == "refused" and is_known and was != now
        if is_redefined and not _is_ruled(move, name, pairs):
            pattern = re.escape(path_str(state_path(new.key))) + "/.*"
            yield Problem(
                f"`{name}` of `{new.key}` was {setting_text(was)}, is {setting_text(now)}: the "
                "saved state means something else under it. Restore the setting, or give a rule "
                f"for all leaves of the transformation, `{pattern}`",
                setting=(new.key, name),
            )
        elif bearing.effect == "window" and (why := _other_length(name, was, now)):
            for leaf, successor in pairs:
                is_progress = leaf.field == bearing.count
                if is_progress and (count := _progress(move.old, leaf, bearing)):
                    is_open = f"a window is open, `{successor.name}` is {count}"
                    yield Problem(f"{is_open}: {why}; complete it first")


def bearing_of(
    name: str, old: TransformationDescription, new: TransformationDescription
) -> Bearing:
    """Returns the effect of a change of a setting; the new definition takes precedence."""
    return new.bearing.get(name) or old.bearing.get(name) or Bearing("nothing")


def _is_ruled(move: Move, name: str, pairs: Pairs) -> bool:
    """Whether the caller has given rules for the setting's own leaf, or for all leaves."""
    own = [x for x in move.new.leaves_of(pairs[0][1].kept_by) if x.field[-1:] == (name,)]
    return any(x.name in move.ruled for x in own) or all(x.name in move.ruled for _, x in pairs)


def _switches(old: TransformationDescription, new: TransformationDescription) -> Iterator[Problem]:
    """Settings that make updates use the same state differently, such as `nesterov`."""
    before, after = _switches_of(old), _switches_of(new)
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name] and bearing_of(name, old, new).effect == "nothing":
            yield _changed(new, name, f"was {before[name]}, is {after[name]}")


def _switches_of(transformation: TransformationDescription) -> dict[str, bool | str]:
    """Its booleans; of a user's transformation words too, and what is in records."""
    # Numbers may change: it is not known which of them give the state its meaning.
    is_users = transformation.source == "types"
    switches: dict[str, bool | str] = {}
    left = [*transformation.settings.items()]
    for name, value in left:
        is_word = is_users and isinstance(value, str) and not _is_derived(value)
        if isinstance(value, bool) or is_word:
            switches[name] = value
        elif is_users and isinstance(value, Mapping) and "function" not in value:
            left += [(f"{name}.{key}", child) for key, child in value.items()]
    return switches


def _is_derived(text: str) -> bool:
    """Whether a string stands for a dtype (which leaves show), an array or an opaque object."""
    if re.match(r"<|\w+\[", text):
        return True
    try:
        return bool(jnp.dtype(text).name == text)
    except Exception:  # NumPy parses the text
        return False


def _changed(new: TransformationDescription, name: str, change: str, where: str = "") -> Problem:
    return Problem(f"`{name}` of `{new.key}`{where} {change}", "optimizer", setting=(new.key, name))


# What acts before moments.


def _is_in_units(side: Side, leaf: LeafInfo) -> bool:
    """Whether a leaf accumulates updates, as they are when they reach its transformation."""
    if has_window(side.keeper(leaf)):
        return False
    is_own = leaf.role == "other" and leaf.parameter is not None and is_trained(side, leaf)
    return leaf.role in _IN_UNITS_OF_UPDATES or is_own


def _other_inputs(
    move: Move, before: TransformationKey, after: TransformationKey
) -> Iterator[Problem]:
    """Changes of what acts on updates before they reach a transformation that goes on."""
    successors = {
        old: new for old, new in move.continued if is_around(new[0], after[0]) and new != after
    }
    old = _acting(move.old, before, successors)
    new = _acting(move.new, after, {new: new for new in successors.values()})
    name = f"`{after}`"
    sides = ((old, new, "before", "after", "gone"), (new, old, "after", "before", "new"))
    for these, others, was, now, word in sides:
        for key, transformation in these.items():
            if key not in others and key in successors.values():
                yield Problem(f"`{key}` acted {was} {name}, and acts {now} it", "optimizer")
            elif key not in others:
                what = f"`{transformation.name}`, which acts before {name}, is {word}"
                yield Problem(what, "optimizer")
    shared = [key for key in new if key in old]
    if shared != [key for key in old if key in new]:
        order = listed(new[key].name for key in shared)
        yield Problem(f"what acts before {name} is in another order: {order}", "optimizer")
    for key in shared:
        if _learns_nothing(move.new, new[key]):
            for setting, change in _changed_settings(old[key], new[key]):
                yield _changed(new[key], setting, change, f", which acts before {name},")


def _acting(
    side: Side, which: TransformationKey, successors: Mapping[TransformationKey, TransformationKey]
) -> dict[Any, TransformationDescription]:
    """What changes updates before a transformation, under names that both sides share."""
    acting: dict[Any, TransformationDescription] = {}
    numbers: Counter[str] = Counter()
    for transformation in side.before(which):
        if (
            transformation.passes_on
            or has_window(transformation)
            or transformation.name in _WITHOUT_EFFECT
        ):
            continue
        key: Any = successors.get(transformation.key)
        if key is None:
            numbers[transformation.name] += 1
            key = transformation.name, numbers[transformation.name]
        acting[key] = transformation
    return acting


def _learns_nothing(side: Side, transformation: TransformationDescription) -> bool:
    """Whether only its settings say what a transformation does."""
    return not any(is_trained(side, leaf) for leaf in side.leaves_of(transformation.key))


def _other_parameters(
    move: Move, before: TransformationKey, after: TransformationKey, pairs: Pairs
) -> str:
    """Why numbers computed from all parameters do not continue; empty if they do."""
    sums = [leaf for _, leaf in pairs if leaf.role == "statistic" and leaf.parameter is None]
    was = {*move.old.followed(before)}
    now = {origin for param in move.new.followed(after) for origin in move.new.came_from(param)}
    if not sums or was == now:
        return ""
    changed = [
        f"{len(params)} {word} (`{path_str(min(params))}`)"
        for word, params in (("gone", was - now), ("new", now - was))
        if params
    ]
    names = ", ".join(dict.fromkeys(f"`{'/'.join(leaf.field)}`" for leaf in sums))
    verb = "is" if len(sums) == 1 else "are"
    return f"{names} of `{after}` {verb} made of all its parameters, of which {', '.join(changed)}"


# Windows: partial results that wait for their end.


def _lost_windows(move: Move) -> Iterator[Problem]:
    """Open windows of which a part would be lost or restart."""
    goes_on: dict[TransformationKey, list[TransformationKey]] = {}
    for before, after in move.continued:
        goes_on.setdefault(before, []).append(after)
    for at, count in _open_windows(move.old):
        is_open = f"a window is open, `{at.name}` is {count}"
        for leaf in _lost_contents(move, at):
            if leaf.name not in move.let_go:
                what = "its contents" if leaf is at else f"`{leaf.name}`"
                lost = f"{is_open}, and {what} would be lost; complete it first"
                yield Problem(lost, old=leaf.name)
        for after in () if move.discards_state else goes_on.get(at.kept_by, ()):
            for leaf in move.new.leaves_of(after):
                is_held = leaf.role in _HELD and leaf.parameter is not None
                if is_held and not move.sources[leaf.name] and leaf.name not in move.ruled:
                    what = f"`{leaf.name}` would have only a part of it"
                    yield Problem(f"{is_open}, and {what}; complete it first", new=leaf.name)


def _open_windows(side: Side) -> Iterator[tuple[LeafInfo, int]]:
    """Yields the leaves that say that a window is open, with how far it has come."""
    for transformation in side.transformations:
        if side.source.schema.groups.get(path_str(transformation.group)) == ():
            continue  # of a group without parameters
        for bearing in transformation.bearing.values():
            for leaf in side.leaves_of(transformation.key):
                is_progress = bearing.effect == "window" and leaf.field == bearing.count
                if is_progress and (count := _progress(side, leaf, bearing)):
                    yield leaf, count


def _lost_contents(move: Move, at: LeafInfo) -> list[LeafInfo]:
    """The leaves of an open window that would be lost; its count stands for all of them."""
    lost = [x for x in move.old.leaves_of(at.kept_by) if x.name in move.dropped]
    if at in lost and not move.discards_state:
        return [at]
    contents = []
    for leaf in lost:
        is_discarded = move.discards_state or leaf.parameter in move.idle
        is_held = leaf.role in _HELD and leaf.parameter is not None
        if leaf.role == "params_copy" if is_discarded else is_held:
            contents.append(leaf)
    return contents


def _progress(side: Side, leaf: LeafInfo, bearing: Bearing) -> int | None:
    """How far a window has come; `None` if the count has no value."""
    value = leaf.value
    length = side.keeper(leaf).settings.get(bearing.modulo or "")
    return value if value is None or not isinstance(length, int) else value % max(length, 1)


def _other_length(name: str, was: Any, now: Any) -> str:
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


# What is reported.


def structural_notes(move: Move) -> Iterator[str]:
    """Yields transformations and groups that are new, gone or in another order."""
    old, new = _names(move.old), _names(move.new)
    sides = ((old, new, "gone"), (new, old, "new"))
    for names, others, word in sides:
        if groups := [path_str(group) for group in names if group and group not in others]:
            noun, verb = ("group", "is") if len(groups) == 1 else ("groups", "are")
            yield f"{noun} {listed(groups)} {verb} {word}"
    # Over all groups: a chain that is divided into groups is neither new nor gone.
    for names, others, word in sides:
        everywhere = Counter(name for members in others.values() for name in members)
        for group, members in names.items():
            there = Counter(others[group]) if group in others else everywhere
            if missing := [*(Counter(members) - there)]:
                verb = "is" if len(missing) == 1 else "are"
                yield f"{listed(missing)} {verb} {word}{_inside(group)}"
    for group in old:
        was, now = old[group], new.get(group, [])
        if was != now and Counter(was) == Counter(now):
            yield f"the order {listed(was)} is now {listed(now)}{_inside(group)}"


def _inside(group: Names) -> str:
    return f" in group `{path_str(group)}`" if group else ""


def _names(side: Side) -> dict[Names, list[str]]:
    by_group: dict[Names, list[str]] = {}
    for transformation in side.transformations:
        members = by_group.setdefault(transformation.group, [])
        if transformation.name not in _WITHOUT_EFFECT:
            members.append(transformation.name)
    return by_group


def setting_notes(move: Move) -> Iterator[tuple[Setting, str]]:
    """Yields settings that have changed."""
    old, new = move.old, move.new
    successors: dict[tuple[TransformationKey, TransformationKey], None] = {}
    for group, name in dict.fromkeys((t.group, t.name) for t in new.transformations):
        if old.alike(group, name):
            numbers, _ = like_numbers(old, new, name, group, group)
            for number, previous in sorted(numbers.items()):
                before, after = (TransformationKey(group, name, n) for n in (previous, number))
                successors[before, after] = None
    # Leaves that moved show which transformations of other groups go on.
    successors |= {pair: None for pair in move.continued if pair[0][0] != pair[1][0]}
    for before, after in successors:
        for setting, change in _changed_settings(
            old.transformation(before), new.transformation(after)
        ):
            yield (after, setting), f"`{setting}` of `{after}` {change}"


def _changed_settings(
    old: TransformationDescription, new: TransformationDescription
) -> Iterator[tuple[str, str]]:
    for name in shared_settings(old, new):
        was, now = (transformation.settings[name] for transformation in (old, new))
        if was != now and name != _INJECTED:
            yield name, f"was {setting_text(was)}, is {setting_text(now)}"
