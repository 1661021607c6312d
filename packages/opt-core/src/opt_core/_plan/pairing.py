"""Matching the leaves of a new state with those of an old one, by their descriptions.

A leaf that follows a parameter is found by transformation, field and parameter. State that a group
keeps for all its parameters is taken from the groups that these come from, if they agree.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jax.numpy as jnp

from opt_core._description import TransformationDescription, TransformationKey
from opt_core._paths import Names
from opt_core._plan.leaves import LeafInfo
from opt_core._plan.sides import (
    Side,
    counts_updates,
    holds_parameters,
    is_recorded,
)

UPDATE: Final = "update"
"""The setting that names the factory of the update function if another one made the state."""


def like_numbers(
    old: Side, new: Side, name: str, was: Names, now: Names
) -> tuple[Mapping[int, int], bool]:
    """Returns, for each number of a transformation in `new`, the matching number in `old`."""
    # Equal settings are matched first, then the rest in order. Of several the first that acts on a
    # common parameter is taken: a chain around groups has one `adam` for each. Also returned is
    # whether the matching is unambiguous.
    before, after = old.alike(was, name), new.alike(now, name)
    is_one = len(before) == len(after) == 1
    free, numbers, is_clear = list(before), dict[int, int](), True
    for is_like in (_is_same, _is_alike, None):
        left = [x for x in after if x.number not in numbers]
        if is_like is None:
            is_clear = not (left and free) or len(left) == len(free)
        for one in left:
            like = [x for x in free if is_like is None or is_like(x, one)]
            # Different functions may update states made by the same one.
            like = [
                x
                for x in like
                if x.settings.get(UPDATE) == one.settings.get(UPDATE)
                or (is_like is None and is_one)
            ]
            if like:
                params = _acted_on(new, one)
                best = next((x for x in like if params & _acted_on(old, x)), like[0])
                numbers[one.number] = best.number
                free.remove(best)
    return numbers, is_clear


def _acted_on(side: Side, transformation: TransformationDescription) -> set[Names]:
    return {*side.followed(transformation.key), *(transformation.parameters or ())}


def shared_settings(
    old: TransformationDescription, new: TransformationDescription
) -> Sequence[str]:
    """Returns the settings that both have; the writer of a checkpoint may have known fewer."""
    return sorted(old.settings.keys() & new.settings.keys())


def switched(
    old: TransformationDescription, new: TransformationDescription
) -> Iterator[tuple[str, bool | str, bool | str]]:
    """Yields changed words, and changed switches in records, of user-defined transformations."""
    # Numbers may change: it is not known which of them give the state its meaning.
    if (old.source, new.source) != ("types", "types"):
        return
    before, after = (dict(_switches(made)) for made in (old, new))
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield name, before[name], after[name]


def _switches(made: TransformationDescription) -> Iterator[tuple[str, bool | str]]:
    left = [(name, value, False) for name, value in made.settings.items()]
    for name, value, is_inside in left:
        is_word = isinstance(value, str) and not _is_derived(value)
        if (is_word and name not in made.bearing) or (isinstance(value, bool) and is_inside):
            yield name, value
        elif isinstance(value, Mapping) and "function" not in value:
            left += [(f"{name}.{key}", child, True) for key, child in value.items()]


def _is_derived(text: str) -> bool:
    """Whether a string stands for a dtype (which leaves show), an array or an opaque object."""
    if re.match(r"<|\w+\[", text):
        return True
    try:
        return bool(jnp.dtype(text).name == text)
    except Exception:  # NumPy parses the text
        return False


def setting_text(value: Any) -> str:
    """Returns a setting as a short text."""
    if isinstance(value, Mapping) and "function" in value:
        held = ", ".join(f"{k}={setting_text(x)}" for k, x in value.items() if k != "function")
        value = f"{value['function']}({held})" if held else value["function"]
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_same(old: TransformationDescription, new: TransformationDescription) -> bool:
    return dict(old.settings) == dict(new.settings)


def _is_alike(old: TransformationDescription, new: TransformationDescription) -> bool:
    return all(old.settings[name] == new.settings[name] for name in shared_settings(old, new))


STEP: Final = "step"
"""Stands for the optimizer's own count of steps among the sources of schedules."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The source of one leaf of the new state.

    Attributes:
      sources: positions in the old state; several if groups agree, none if it is new.
      note: why it is new, or a remark.
      lookalike: for a new leaf, the position of an old leaf of the same name but another meaning.
      counts: for a schedule's new count, the leaf that it continues from.
    """

    sources: tuple[int, ...] = ()
    note: str = ""
    lookalike: int | None = None
    counts: int | Literal["step"] | None = None


@dataclasses.dataclass(frozen=True)
class Pairing:
    """The sources of all leaves of a new state.

    Attributes:
      pairs: one per leaf of the new state.
      reinitialised: the transformations that are reinitialised, with the reason.
      unclear: ambiguities, as text.
    """

    pairs: tuple[Pair, ...]
    reinitialised: Mapping[TransformationKey, str]
    unclear: tuple[str, ...]


def pair_leaves(
    old: Side,
    new: Side,
    given: Mapping[int, Sequence[int]],
    origins: Mapping[Names, Sequence[Names]],
) -> Pairing:
    """Returns the source of every leaf of a new state."""
    # A setting recorded in the state, such as an injected learning rate, keeps its saved value,
    # which may have been set at run time, unless the new definition has changed the setting: then
    # its number acts. `given` are sources that the caller has decided, by position; `origins` the
    # old parameters that new ones are made of.
    return _Walk(old, new, given, origins).pairing()


@dataclasses.dataclass
class _Walk:
    """One walk over the leaves of a new state."""

    old: Side
    new: Side
    given: Mapping[int, Sequence[int]]
    origins: Mapping[Names, Sequence[Names]]

    def __post_init__(self) -> None:
        self._numbers: dict[tuple[Names, Names, str], Mapping[int, int]] = {}
        self._unclear: list[str] = []

    def pairing(self) -> Pairing:
        leaves = self.new.leaves
        free = [i for i in range(len(leaves)) if i not in self.given]
        pairs = {i: self._own(leaves[i]) for i in free if leaves[i].parameter is not None}
        pairs |= {i: Pair(tuple(found)) for i, found in self.given.items()}
        self._pairs = pairs
        shared = {i: self._shared(leaves[i]) for i in free if leaves[i].parameter is None}
        reinitialised = dict(self._reinitialised(shared))
        for i in free:
            pairs[i] = self._decided(i, pairs.get(i), shared.get(i, ()), reinitialised)
        self._give_keys_once(shared)
        for i, leaf in enumerate(leaves):
            if leaf.role == "schedule_count" and not pairs[i].sources and i in shared:
                pairs[i] = dataclasses.replace(pairs[i], counts=self._updates(i))
        ordered = [pairs[i] for i in range(len(leaves))]
        found = tuple(self._with_notes(ordered))
        return Pairing(found, reinitialised, tuple(self._unclear))

    def _decided(
        self,
        i: int,
        own: Pair | None,
        shared: Sequence[int],
        reinitialised: Mapping[TransformationKey, str],
    ) -> Pair:
        leaf = self.new.leaves[i]
        is_free = leaf.role in ("schedule_count", "key")
        if own is None and is_recorded(leaf, self.new.transformation(leaf.kept_by)):
            return self._recorded(leaf, shared)
        if own is None and leaf.role == "schedule_count":
            why = self._unlike(shared, leaf)
            return Pair(note=why) if why else Pair(tuple(shared))
        if not is_free and (why := reinitialised.get(leaf.kept_by, "")):
            return Pair(note=why)
        if own is None and shared and self._holds_others(leaf, self.old.leaves[shared[0]]):
            return Pair(note="it concatenates parameters, and these are not the same")
        return Pair(tuple(shared)) if own is None else own

    def _own(self, leaf: LeafInfo) -> Pair:
        """The old leaf for one that follows a parameter."""
        sources = self.old.groups(leaf.kept_by.name, leaf.parameter)
        if leaf.group not in sources and len(sources) > 1:
            return Pair(note="several groups have one")
        group = leaf.group if leaf.group in sources else next(iter(sources), None)
        found = None if group is None else self._in(group, leaf)
        if found is None:
            is_other = leaf.group in sources and self._number(leaf.group, leaf) is None
            return Pair(note="no other has its settings" if is_other else "")
        source = self.old.leaves[found]
        one, other = self.old.transformation(source.kept_by), self.new.transformation(leaf.kept_by)
        if None in (source.dimensions, leaf.dimensions):
            # Their dimensions are not known: only equal settings ensure equal dimensions.
            is_same = _is_alike(one, other)
        else:
            is_same = source.dimensions == leaf.dimensions
        was, now = (
            "?"
            if side.dimensions is None
            else ",".join("-" if dim is None else str(dim) for dim in side.dimensions)
            for side in (source, leaf)
        )
        why = f"had the dimensions {was} of its parameter, has {now}"
        return Pair((found,)) if is_same else Pair(note=why, lookalike=found)

    def _in(self, group: Names, leaf: LeafInfo) -> int | None:
        number = self._number(group, leaf)
        return None if number is None else self.old.find(leaf, group, number)

    def _number(self, group: Names, leaf: LeafInfo) -> int | None:
        """The old number of the transformation of a leaf."""
        name = leaf.kept_by.name
        key = group, leaf.group, name
        if key not in self._numbers:
            before, after = self.old.alike(group, name), self.new.alike(leaf.group, name)
            if not before:  # they are not described
                return leaf.kept_by.number
            self._numbers[key], is_clear = like_numbers(self.old, self.new, name, group, leaf.group)
            if not is_clear:
                many = f"{len(before)} `{name}` the {len(after)} are"
                self._unclear.append(f"it is not clear which of {many}")
        return self._numbers[key].get(leaf.kept_by.number)

    def _shared(self, leaf: LeafInfo) -> Sequence[int]:
        """The leaves of the old groups that may be the source of a leaf of a whole group."""
        found = (self._in(group, leaf) for group in self._group_sources(leaf))
        return [i for i in found if i is not None]

    def _group_sources(self, leaf: LeafInfo) -> Sequence[Names]:
        """The groups of the old state with a possible source for a leaf of a whole group."""
        having = self.old.groups(leaf.kept_by.name)
        where, leaves = leaf.kept_by, self.new.leaves
        own = [i for i in self.new.leaves_of(where) if leaves[i].parameter is not None]
        found = {self.old.leaves[k].group for i in own for k in self._pairs[i].sources}
        if own and not found:
            params = [o for param in self.new.followed(where) for o in self._of(param)]
            found = {g for param in params for g in self.old.groups(leaf.kept_by.name, param)}
        elif not own:
            # The members of a group within one definition are not always known; its name suffices.
            if leaf.group in having and leaf.group not in self.old.owners.values():
                return [leaf.group]
            params = [o for p in _params(self.new, leaf) for o in self._of(p)]
            known = [set(self._groups_of(o, having)) for o in params if o in self.old.owners]
            is_whole = bool(known) and all(leaf.group in groups for groups in known)
            found = {leaf.group} if is_whole else set().union(*known)
        return [group for group in having if group in found]

    def _holds_others(self, leaf: LeafInfo, source: LeafInfo) -> bool:
        """Whether a leaf concatenates other parameters, or these in another order."""
        if not holds_parameters(leaf, self.new.transformation(leaf.kept_by)):
            return False
        now = [list(self._of(param)) for param in _params(self.new, leaf)]
        return now != [[param] for param in _params(self.old, source)]

    def _of(self, param: Names) -> Sequence[Names]:
        return self.origins.get(param, (param,))

    def _groups_of(self, param: Names, having: Sequence[Names]) -> Iterator[Names]:
        """The groups of the old state that a parameter is, or may be, in."""
        owner = self.old.owners[param]
        inner = self.old.groups(param)
        for group in having:
            if group == owner[: len(group)] or group in inner:
                yield group
            elif group[: len(owner)] == owner and not any(len(g) > len(owner) for g in inner):
                yield group  # one inside of a definition, that keeps nothing per parameter

    def _reinitialised(
        self, shared: Mapping[int, Sequence[int]]
    ) -> Iterator[tuple[TransformationKey, str]]:
        """The transformations of groups that must be reinitialised, with the reason."""
        # The first of several reasons counts.
        for i, found in reversed(list(shared.items())):
            leaf = self.new.leaves[i]
            where = leaf.kept_by
            is_free = leaf.role in ("schedule_count", "key")
            if is_free or not found or is_recorded(leaf, self.new.transformation(where)):
                continue
            if why := self._unlike(found, leaf):
                yield where, f"reinitialised: {why}"

    def _unlike(self, found: Sequence[int], leaf: LeafInfo) -> str:
        """Returns how the groups that a leaf comes from disagree; empty if they agree."""
        is_same = self.old.same(found) if found else True
        if is_same:
            return ""
        field = "/".join(leaf.field)
        if is_same is None:
            return f"nothing says whether its groups agree about `{field}`"
        values = [("/".join(self.old.leaves[i].group), self.old.leaves[i].value) for i in found]
        shown_values = ", ".join(
            f"`{group}` {value}" if group else f"no group {value}"
            for group, value in values
            if value is not None
        )
        return (
            f"its groups do not agree about `{field}`{f': {shown_values}' if shown_values else ''}"
        )

    def _recorded(self, leaf: LeafInfo, found: Sequence[int]) -> Pair:
        """A value that was set at run time continues, unless the setting has changed."""
        name = leaf.field[-1]
        setting = self.new.transformation(leaf.kept_by).settings.get(name)
        before = [self.old.transformation(self.old.leaves[i].kept_by).settings for i in found]
        if not all(name in settings for settings in before):
            return Pair(tuple(found), f"saved; nothing says what the code gave as `{name}`")
        for was in (settings[name] for settings in before):
            if was != setting:
                changed = f"`{name}` was {setting_text(was)}, is {setting_text(setting)}"
                return Pair(note=f"{changed} in the code, which acts")
        why = self._unlike(found, leaf)
        return Pair(note=why) if why else Pair(tuple(found))

    def _give_keys_once(self, shared: Mapping[int, Sequence[int]]) -> None:
        """Each key is used once: groups with copies of one would draw the same random numbers."""
        leaves = self.new.leaves
        keys = [i for i in shared if leaves[i].role == "key" and self._pairs[i].sources]
        used: set[int] = set()

        def moves(i: int) -> bool:
            sources = self._pairs[i].sources
            return all(self.old.leaves[k].group != leaves[i].group for k in sources)

        for i in sorted(keys, key=moves):  # first those that stay in their group
            free = [k for k in self._pairs[i].sources if k not in used]
            # Any of several keys will do.
            taken = free if len(free) > 1 and self.old.same(free) else free[:1]
            self._pairs[i] = Pair(
                tuple(taken), "" if taken else "its key continues in another group"
            )
            used.update(taken)

    def _updates(self, schedule: int) -> int | Literal["step"]:
        """The count of updates that drives a new schedule."""
        for i, leaf in enumerate(self.new.leaves):
            if not _counts_around(self.new, i, schedule):
                continue
            what = leaf.transformation, leaf.field
            olds = enumerate(self.old.leaves)
            like = (k for k, x in olds if (x.transformation, x.field) == what)
            sources = self._pairs[i].sources or tuple(like)
            if sources and self.old.same(sources):
                return sources[0]
        return STEP

    def _with_notes(self, pairs: Sequence[Pair]) -> Iterator[Pair]:
        """Adds notes on changed numbers, and on settings without effect, to continued leaves."""
        for i, (pair, leaf) in enumerate(zip(pairs, self.new.leaves, strict=True)):
            notes = [pair.note] if pair.note else []
            if pair.sources and i not in self.given:
                source = self.old.leaves[pair.sources[0]]
                if source.group == leaf.group and source.transformation != leaf.transformation:
                    notes.append(f"was `{source.kept_by._replace(group=())}`, by its settings")
            if pair.sources and leaf.role not in ("count", "schedule_count", "key"):
                notes += self._without_effect(leaf, self.old.leaves[pair.sources[0]])
            yield dataclasses.replace(pair, note=", ".join(notes))

    def _without_effect(self, leaf: LeafInfo, source: LeafInfo) -> Iterator[str]:
        one, other = self.old.transformation(source.kept_by), self.new.transformation(leaf.kept_by)
        for name, bearing in other.bearing.items():
            if bearing.effect == "initial" and name in one.settings:
                was, now = one.settings[name], other.settings.get(name)
                if was != now:
                    yield f"`{name}` was {was}, is {now}: no effect on the saved state"


def _counts_around(side: Side, i: int, inner: int) -> bool:
    """Whether a leaf counts the updates of a window of mini-steps around another."""
    leaf, other = side.leaves[i], side.leaves[inner]
    place: Names = side.paths[i][: len(side.paths[i]) - len(leaf.field)]
    return (
        counts_updates(leaf, side.transformation(leaf.kept_by))
        and side.paths[inner][: len(place)] == place
        and other.transformation != leaf.transformation
        and leaf.group == other.group[: len(leaf.group)]
    )


def _params(side: Side, leaf: LeafInfo) -> Sequence[Names]:
    """The parameters of the transformation of a leaf, or else of its group."""
    if (known := side.transformation(leaf.kept_by).parameters) is not None:
        return known
    inside = [p for p in side.owners if leaf.group in side.groups(p)]
    return inside or [p for p, owner in side.owners.items() if owner == leaf.group[: len(owner)]]
