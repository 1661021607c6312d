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

from opt_core._description.values import (
    LeafDescription,
    TransformationDescription,
    TransformationKey,
)
from opt_core._paths import Names
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
    """Returns, for each number of a transformation in `new`, the matching number in `old`.

    Equal settings are matched first, then the rest in order. Of several the first that acts on a
    common parameter is taken: a chain around groups has one `adam` for each.

    Args:
      old: a state.
      new: the state to make.
      name: of the transformations.
      was: their group in `old`.
      now: their group in `new`.

    Returns:
      The numbers, and whether the matching is unambiguous.
    """
    before, after = old.alike(was, name), new.alike(now, name)

    def best(like: Sequence[TransformationDescription], made: TransformationDescription) -> Any:
        params = _acted_on(new, made)
        return next((one for one in like if params & _acted_on(old, one)), like[0])

    free = list(before)
    found: dict[int, int] = {}
    for is_like in (_is_same, _is_alike):
        for made in after:
            like = [old for old in free if _has_one_update(old, made) and is_like(old, made)]
            if made.number not in found and like:
                found[made.number] = (one := best(like, made)).number
                free.remove(one)
    left = [made for made in after if made.number not in found]
    is_clear = not (left and free) or len(left) == len(free)
    is_one = len(before) == len(after) == 1
    for made in left:
        like = [old for old in free if is_one or _has_one_update(old, made)]
        if like:
            found[made.number] = (one := best(like, made)).number
            free.remove(one)
    return found, is_clear


def _acted_on(side: Side, made: TransformationDescription) -> set[Names]:
    return {*side.followed(made.key), *(made.parameters or ())}


def shared_settings(
    old: TransformationDescription, new: TransformationDescription
) -> Sequence[str]:
    """Returns the settings that both have; the writer of a checkpoint may have known fewer."""
    return sorted(old.settings.keys() & new.settings.keys())


def switched(old: TransformationDescription, new: TransformationDescription) -> Iterator[str]:
    """Yields changed words, and changed switches in records, of user-defined transformations.

    Numbers may change: it is not known which of them give the state its meaning.
    """
    if (old.source, new.source) != ("types", "types"):
        return
    before, after = (dict(_switches(made)) for made in (old, new))
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield f"`{name}` of `{new.name}` was {before[name]}, is {after[name]}"


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


def _has_one_update(old: TransformationDescription, new: TransformationDescription) -> bool:
    """Different functions may update states made by the same one."""
    return bool(old.settings.get(UPDATE) == new.settings.get(UPDATE))


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
    *,
    given: Mapping[int, Sequence[int]] | None = None,
    origins: Mapping[Names, Sequence[Names]] | None = None,
) -> Pairing:
    """Returns the source of every leaf of a new state.

    A setting recorded in the state, such as an injected learning rate, keeps its saved value, which
    may have been set at run time, unless the new definition has changed the setting: then its
    number acts.

    Args:
      old: the existing state.
      new: the state to make.
      given: the sources of leaves that the caller has decided, by position.
      origins: the old parameters that new ones are made of, if they differ.
    """
    return _Walk(old, new, given or {}, origins or {}).pairing()


def continued(
    old: Side, new: Side, pairs: Sequence[Pair]
) -> Mapping[tuple[TransformationKey, TransformationKey], Pairs]:
    """Returns the transformations whose state continues, with the positions of their leaves.

    Counts of schedules and recorded settings are not considered.
    """
    found: dict[tuple[TransformationKey, TransformationKey], list[tuple[int, int]]] = {}
    for j, (pair, leaf) in enumerate(zip(pairs, new.descriptions, strict=True)):
        if leaf.role != "schedule_count" and not is_recorded(
            leaf, new.transformation(leaf.kept_by)
        ):
            for i in pair.sources:
                found.setdefault((old.descriptions[i].kept_by, leaf.kept_by), []).append((i, j))
    return found


Pairs = Sequence[tuple[int, int]]
"""Positions in the old state with those in the new one."""


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
        leaves = self.new.descriptions
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
                pairs[i] = dataclasses.replace(pairs[i], counts=self._updates(leaf))
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
        leaf = self.new.descriptions[i]
        is_free = leaf.role in ("schedule_count", "key")
        if own is None and is_recorded(leaf, self.new.transformation(leaf.kept_by)):
            return self._recorded(leaf, shared)
        if own is None and leaf.role == "schedule_count":
            why = self._unlike(shared, leaf)
            return Pair(note=why) if why else Pair(tuple(shared))
        if not is_free and (why := reinitialised.get(leaf.kept_by, "")):
            return Pair(note=why)
        if own is None and shared and self._holds_others(leaf, self.old.descriptions[shared[0]]):
            return Pair(note="it concatenates parameters, and these are not the same")
        return Pair(tuple(shared)) if own is None else own

    def _own(self, leaf: LeafDescription) -> Pair:
        """The old leaf for one that follows a parameter."""
        sources = self.old.groups(leaf.transformation, leaf.parameter)
        if leaf.group not in sources and len(sources) > 1:
            return Pair(note="several groups have one")
        group = leaf.group if leaf.group in sources else next(iter(sources), None)
        found = None if group is None else self._in(group, leaf)
        if found is None:
            is_other = leaf.group in sources and self._number(leaf.group, leaf) is None
            return Pair(note="no other has its settings" if is_other else "")
        source = self.old.descriptions[found]
        one, other = self.old.transformation(source.kept_by), self.new.transformation(leaf.kept_by)
        if None in (source.dimensions, leaf.dimensions):
            # Their dimensions are not known: only equal settings ensure equal dimensions.
            names = shared_settings(one, other)
            is_same = all(one.settings[name] == other.settings[name] for name in names)
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

    def _in(self, group: Names, leaf: LeafDescription) -> int | None:
        number = self._number(group, leaf)
        return None if number is None else self.old.find(leaf, group, number)

    def _number(self, group: Names, leaf: LeafDescription) -> int | None:
        """The old number of the transformation of a leaf."""
        key = group, leaf.group, leaf.transformation
        if key not in self._numbers:
            before = self.old.alike(group, leaf.transformation)
            after = self.new.alike(leaf.group, leaf.transformation)
            if not before:  # they are not described
                return leaf.number
            self._numbers[key], is_clear = like_numbers(
                self.old, self.new, leaf.transformation, group, leaf.group
            )
            if not is_clear:
                self._unclear.append(
                    f"it is not clear which of {len(before)} `{leaf.transformation}` the "
                    f"{len(after)} are"
                )
        return self._numbers[key].get(leaf.number)

    def _shared(self, leaf: LeafDescription) -> Sequence[int]:
        """The leaves of the old groups that may be the source of a leaf of a whole group."""
        found = (self._in(group, leaf) for group in self._group_sources(leaf))
        return [i for i in found if i is not None]

    def _group_sources(self, leaf: LeafDescription) -> Sequence[Names]:
        """The groups of the old state with a possible source for a leaf of a whole group."""
        having = self.old.groups(leaf.transformation)
        where, leaves = leaf.kept_by, self.new.descriptions
        own = [i for i in self.new.leaves_of(where) if leaves[i].parameter is not None]
        found = {self.old.descriptions[k].group for i in own for k in self._pairs[i].sources}
        if own and not found:
            params = [o for param in self.new.followed(where) for o in self._of(param)]
            found = {g for param in params for g in self.old.groups(leaf.transformation, param)}
        elif not own:
            # The members of a group within one definition are not always known; its name suffices.
            if leaf.group in having and leaf.group not in self.old.owners.values():
                return [leaf.group]
            params = [o for p in _params(self.new, leaf) for o in self._of(p)]
            known = [set(self._groups_of(o, having)) for o in params if o in self.old.owners]
            is_whole = bool(known) and all(leaf.group in groups for groups in known)
            found = {leaf.group} if is_whole else set().union(*known)
        return [group for group in having if group in found]

    def _holds_others(self, leaf: LeafDescription, source: LeafDescription) -> bool:
        """Whether a leaf concatenates other parameters, or these in another order."""
        if not holds_parameters(leaf):
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
            leaf = self.new.descriptions[i]
            where = leaf.kept_by
            is_free = leaf.role in ("schedule_count", "key")
            if is_free or not found or is_recorded(leaf, self.new.transformation(where)):
                continue
            if why := self._unlike(found, leaf):
                yield where, f"reinitialised: {why}"

    def _unlike(self, found: Sequence[int], leaf: LeafDescription) -> str:
        """Returns how the groups that a leaf comes from disagree; empty if they agree."""
        is_same = self.old.same(found) if found else True
        if is_same:
            return ""
        field = "/".join(leaf.field)
        if is_same is None:
            return f"nothing says whether its groups agree about `{field}`"
        values = [("/".join(self.old.descriptions[i].group), self.old.value(i)) for i in found]
        shown_values = ", ".join(
            f"`{group}` {value}" if group else f"no group {value}"
            for group, value in values
            if value is not None
        )
        return (
            f"its groups do not agree about `{field}`{f': {shown_values}' if shown_values else ''}"
        )

    def _recorded(self, leaf: LeafDescription, found: Sequence[int]) -> Pair:
        """A value that was set at run time continues, unless the setting has changed."""
        name = leaf.field[-1]
        setting = self.new.transformation(leaf.kept_by).settings.get(name)
        before = [self.old.transformation(self.old.descriptions[i].kept_by).settings for i in found]
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
        leaves = self.new.descriptions
        keys = [i for i in shared if leaves[i].role == "key" and self._pairs[i].sources]
        used: set[int] = set()

        def moves(i: int) -> bool:
            sources = self._pairs[i].sources
            return all(self.old.descriptions[k].group != leaves[i].group for k in sources)

        for i in sorted(keys, key=moves):  # first those that stay in their group
            free = [k for k in self._pairs[i].sources if k not in used]
            # Any of several keys will do.
            taken = free if len(free) > 1 and self.old.same(free) else free[:1]
            self._pairs[i] = Pair(
                tuple(taken), "" if taken else "its key continues in another group"
            )
            used.update(taken)

    def _updates(self, schedule: LeafDescription) -> int | Literal["step"]:
        """The count of updates that drives a new schedule."""
        for i, leaf in enumerate(self.new.descriptions):
            if not _counts_around(leaf, self.new, schedule):
                continue
            like = (k for k, old in enumerate(self.old.descriptions) if old.key == leaf.key)
            sources = self._pairs[i].sources or tuple(like)
            if sources and self.old.same(sources):
                return sources[0]
        return STEP

    def _with_notes(self, pairs: Sequence[Pair]) -> Iterator[Pair]:
        """Adds notes on changed numbers, and on settings without effect, to continued leaves."""
        for i, (pair, leaf) in enumerate(zip(pairs, self.new.descriptions, strict=True)):
            notes = [pair.note] if pair.note else []
            if pair.sources and i not in self.given:
                source = self.old.descriptions[pair.sources[0]]
                if source.group == leaf.group and source.number != leaf.number:
                    notes.append(f"was `{source.kept_by._replace(group=())}`, by its settings")
            if pair.sources and leaf.role not in ("count", "schedule_count", "key"):
                notes += self._without_effect(leaf, self.old.descriptions[pair.sources[0]])
            yield dataclasses.replace(pair, note=", ".join(notes))

    def _without_effect(self, leaf: LeafDescription, source: LeafDescription) -> Iterator[str]:
        one, other = self.old.transformation(source.kept_by), self.new.transformation(leaf.kept_by)
        for name, bearing in other.bearing.items():
            if bearing.effect == "initial" and name in one.settings:
                was, now = one.settings[name], other.settings.get(name)
                if was != now:
                    yield f"`{name}` was {was}, is {now}: no effect on the saved state"


def _counts_around(leaf: LeafDescription, side: Side, inner: LeafDescription) -> bool:
    """Whether a leaf counts the updates of a window of mini-steps around another."""
    place: Names = leaf.path[: len(leaf.path) - len(leaf.field)]
    return (
        counts_updates(leaf, side.transformation(leaf.kept_by))
        and inner.path[: len(place)] == place
        and (inner.transformation, inner.number) != (leaf.transformation, leaf.number)
        and leaf.group == inner.group[: len(leaf.group)]
    )


def _params(side: Side, leaf: LeafDescription) -> Sequence[Names]:
    """The parameters of the transformation of a leaf, or else of its group."""
    if (known := side.transformation(leaf.kept_by).parameters) is not None:
        return known
    inside = [p for p in side.owners if leaf.group in side.groups(p)]
    return inside or [p for p, owner in side.owners.items() if owner == leaf.group[: len(owner)]]
