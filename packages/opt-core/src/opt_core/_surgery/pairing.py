"""Which leaf of an old state each leaf of a new one is, by what the descriptions of both say.

A leaf that follows a parameter is found by its key. What a group keeps for all its parameters is
taken from the groups that these come from, where they agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from opt_core._description.values import (
    LeafDescription,
    StateDescription,
    TransformationDescription,
)
from opt_core._paths import Names
from opt_core._surgery.placement import agree

Made: TypeAlias = tuple[Names, str, int]
"""A transformation: group, name, number."""

TRAINED: Final = frozenset({"moment", "second_moment", "accumulator", "params_copy", "factored"})
"""Roles of leaves that training has made what they are."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two optimizers.

    Attributes:
      description: of its state.
      leaves: of its state.
      owners: the group of every parameter that is updated, as `MultiOptimizer`s have groups.
    """

    description: StateDescription
    leaves: Sequence[Any]
    owners: Mapping[Names, Names]

    def __post_init__(self) -> None:
        index: dict[Any, int] = {}
        groups: dict[Any, dict[Names, None]] = {}
        alike: dict[tuple[Names, str], list[TransformationDescription]] = {}
        for i, leaf in enumerate(self.told):
            index[leaf.group, leaf.key] = i
            groups.setdefault((leaf.transformation, leaf.parameter), {})[leaf.group] = None
            groups.setdefault(leaf.transformation, {})[leaf.group] = None
            groups.setdefault(leaf.parameter, {})[leaf.group] = None
        for made in self.description.transformations:
            alike.setdefault((made.group, made.name), []).append(made)
        for found in alike.values():
            found.sort(key=lambda made: made.number)
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_groups", groups)
        object.__setattr__(self, "_alike", alike)

    @property
    def told(self) -> Sequence[LeafDescription]:
        """The descriptions of the leaves."""
        return self.description.leaves

    def find(self, group: Names, key: Any) -> int | None:
        """Returns the position of the leaf of a group with a key."""
        found: int | None = self._index.get((group, key))  # type: ignore[attr-defined]
        return found

    def groups(self, what: Any) -> list[Names]:
        """Returns the groups that a transformation, a parameter or a pair of them is in."""
        return list(self._groups.get(what, ()))  # type: ignore[attr-defined]

    def alike(self, group: Names, name: str) -> Sequence[TransformationDescription]:
        """Returns the transformations of one name in a group."""
        found: Sequence[TransformationDescription] = self._alike.get((group, name), ())  # type: ignore[attr-defined]
        return found

    def made(self, which: Made) -> TransformationDescription:
        """Returns a transformation."""
        return self.description.made(*which)


def made_of(leaf: LeafDescription) -> Made:
    """Returns the transformation that a leaf belongs to."""
    return leaf.group, leaf.transformation, leaf.number


def is_recorded(leaf: LeafDescription, made: TransformationDescription) -> bool:
    """Whether a leaf is a setting that the state records, and not what training made of it."""
    return leaf.parameter is None and leaf.role == "other" and leaf.field[-1] in made.settings


def counts_updates(leaf: LeafDescription, made: TransformationDescription) -> bool:
    """Whether a leaf counts the updates that a window of mini-steps has let through."""
    windows = {bearing.count for bearing in made.bearing.values() if bearing.effect == "window"}
    is_count = leaf.parameter is None and leaf.role == "count"
    return bool(windows) and is_count and leaf.field not in windows


def has_window(made: TransformationDescription) -> bool:
    """Whether it holds what waits for the end of a window or a cycle."""
    return any(bearing.effect == "window" for bearing in made.bearing.values())


@dataclasses.dataclass(frozen=True)
class Pair:
    """What one leaf of the new state comes from.

    Attributes:
      sources: positions in the old state; several where groups agree, none where it is new.
      note: why it is new.
    """

    sources: tuple[int, ...] = ()
    note: str = ""


class Pairing:
    """The pairs of all leaves.

    Args:
      old: the state that there is.
      new: the state to be made.
      joins: whether leaves without moments join others at the count of these.

    Attributes:
      pairs: one per leaf of the new state.
      unclear: what nothing decides, for people to read.
    """

    def __init__(self, old: Side, new: Side, *, joins: bool) -> None:
        self._old, self._new, self._joins = old, new, joins
        self._numbers: dict[tuple[Names, Names, str], Mapping[int, int]] = {}
        self.unclear: list[str] = []
        own = {i: self._own(leaf) for i, leaf in enumerate(new.told) if leaf.parameter is not None}
        self._sources = {i: found for i, found in own.items() if found is not None}
        self._members = self._by_transformation()
        shared = {
            i: self._shared(leaf) for i, leaf in enumerate(new.told) if leaf.parameter is None
        }
        anew = dict(self._anew(shared))
        pairs = [self._pair(i, shared, anew) for i in range(len(new.told))]
        self.pairs = tuple(self._keys_once(pairs))

    def _pair(self, i: int, shared: Mapping[int, Sequence[int]], anew: Mapping[Made, str]) -> Pair:
        leaf = self._new.told[i]
        found = shared.get(i, (self._sources[i],) if i in self._sources else ())
        if leaf.role == "schedule_count":
            same = agree(self._old.leaves[k] for k in found)
            return Pair(tuple(found)) if same else Pair(note="its groups do not agree about it")
        if (why := anew.get(made_of(leaf))) is not None:
            return Pair(note=why)
        if is_recorded(leaf, self._new.made(made_of(leaf))):
            return self._recorded(leaf, found)
        return Pair(tuple(found))

    def _keys_once(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Each key goes on once: groups with copies of one would draw the same random numbers."""
        made = list(pairs)
        keys = [
            i for i, leaf in enumerate(self._new.told) if leaf.role == "key" and pairs[i].sources
        ]
        used: set[int] = set()
        # First those that stay in their group.
        for i in sorted(keys, key=lambda i: not self._stays(i, pairs[i])):
            # Any of several keys makes random numbers that are as good.
            free = next((k for k in pairs[i].sources if k not in used), None)
            if free is None:
                made[i] = Pair(note="its key goes on in another group")
            else:
                used.add(free)
                made[i] = Pair((free,))
        return made

    def _stays(self, i: int, pair: Pair) -> bool:
        return any(self._old.told[k].group == self._new.told[i].group for k in pair.sources)

    def _own(self, leaf: LeafDescription) -> int | None:
        """The leaf of the old state with the key of one that follows a parameter."""
        homes = self._old.groups((leaf.transformation, leaf.parameter))
        home = leaf.group if leaf.group in homes else homes[0] if len(homes) == 1 else None
        if home is None:
            return None
        found = self._in(home, leaf)
        if found is None or leaf.dimensions is not None:
            return found
        # Nothing says which dimensions they keep: only the same settings keep the same ones.
        one = self._old.made(made_of(self._old.told[found]))
        same = one.settings == self._new.made(made_of(leaf)).settings
        return found if same else None

    def _in(self, home: Names, leaf: LeafDescription) -> int | None:
        number = self._numbers_of(home, leaf.group, leaf.transformation).get(leaf.number)
        if number is None:
            return None
        return self._old.find(home, leaf.key._replace(number=number))

    def _numbers_of(self, home: Names, group: Names, name: str) -> Mapping[int, int]:
        """Which of several transformations of one name each of the new ones was."""
        key = home, group, name
        if key not in self._numbers:
            before, after = self._old.alike(home, name), self._new.alike(group, name)
            found, is_clear = _numbers(before, after)
            self._numbers[key] = found
            if not is_clear:
                self.unclear.append(
                    f"nothing says which of {len(before)} `{name}` the {len(after)} are"
                )
        return self._numbers[key]

    def _by_transformation(self) -> Mapping[Made, Sequence[int]]:
        found: dict[Made, list[int]] = {}
        for i, leaf in enumerate(self._new.told):
            if leaf.parameter is not None:
                found.setdefault(made_of(leaf), []).append(i)
        return found

    def _shared(self, leaf: LeafDescription) -> Sequence[int]:
        """The leaves of the old groups that a leaf of a whole group may come from."""
        found = (self._in(home, leaf) for home in self._homes(leaf))
        return [i for i in found if i is not None]

    def _homes(self, leaf: LeafDescription) -> Sequence[Names]:
        members = self._members.get(made_of(leaf))
        if members is not None:
            given = (self._sources.get(i) for i in members)
            return _unique(self._old.told[i].group for i in given if i is not None)
        having = self._old.groups(leaf.transformation)
        params = [p for p in self._params(self._new, leaf.group) if p in self._old.owners]
        known = _unique(group for p in params for group in self._groups_of(p, having))
        # Who is in a group inside of one definition is not always known; its name says enough.
        is_label = leaf.group in known and leaf.group not in self._old.owners.values()
        return [leaf.group] if is_label else known

    def _groups_of(self, param: Names, having: Sequence[Names]) -> Iterator[Names]:
        """The groups of the old state that a parameter is, or may be, in."""
        owner = self._old.owners[param]
        inner = self._old.groups(param)
        for group in having:
            if group == owner[: len(group)] or group in inner:
                yield group
            elif group[: len(owner)] == owner and not any(len(g) > len(owner) for g in inner):
                yield group  # one inside of a definition, that keeps nothing per parameter

    @staticmethod
    def _params(side: Side, group: Names) -> Sequence[Names]:
        """The parameters of a group."""
        inside = [p for p in side.owners if group in side.groups(p)]
        return inside or [p for p, owner in side.owners.items() if owner == group[: len(owner)]]

    def _anew(self, shared: Mapping[int, Sequence[int]]) -> Iterator[tuple[Made, str]]:
        """The transformations of groups that cannot go on, and why."""
        for i, found in shared.items():
            leaf = self._new.told[i]
            where = made_of(leaf)
            is_free = leaf.role in ("schedule_count", "key") or is_recorded(
                leaf, self._new.made(where)
            )
            if is_free or not found:
                continue
            field = "/".join(leaf.field)
            if not agree(self._old.leaves[k] for k in found):
                yield where, f"its groups do not agree about `{field}`"
            elif leaf.role == "count" and not self._joins and self._has_joined(where):
                # Moments of zero at a large count: Adam's steps would be several times too long.
                yield where, f"parameters without moments join it: its `{field}` is not theirs"

    def _has_joined(self, where: Made) -> bool:
        if has_window(self._new.made(where)):
            return False  # what waits in it is nothing, unless the window is open: an error
        trained = [i for i in self._members.get(where, ()) if self._new.told[i].role in TRAINED]
        # AMSGrad's maximum is new to a parameter that has Adam's moments.
        known = {self._new.told[i].parameter for i in trained if i in self._sources}
        return any(self._new.told[i].parameter not in known for i in trained)

    def _recorded(self, leaf: LeafDescription, found: Sequence[int]) -> Pair:
        """A value that was changed at run time outlives surgery, unless the setting changed."""
        name = leaf.field[-1]
        setting = self._new.made(made_of(leaf)).settings.get(name)
        before = [self._old.made(made_of(self._old.told[i])).settings.get(name) for i in found]
        if not found or any(value != setting for value in before):
            return Pair(note=f"`{name}` is the new definition's" if found else "")
        same = agree(self._old.leaves[i] for i in found)
        return Pair(tuple(found)) if same else Pair(note="its groups do not agree about it")


def _numbers(
    before: Sequence[TransformationDescription], after: Sequence[TransformationDescription]
) -> tuple[Mapping[int, int], bool]:
    """Pairs by settings, then the others in their order; and whether that is certain."""
    if len(before) == len(after) == 1:
        return {after[0].number: before[0].number}, True
    free = list(before)
    found: dict[int, int] = {}
    for made in after:
        same = next((old for old in free if old.settings == made.settings), None)
        if same is not None:
            found[made.number] = same.number
            free.remove(same)
    left = [made for made in after if made.number not in found]
    found |= {new.number: old.number for new, old in zip(left, free, strict=False)}
    return found, not (left and free) or len(left) == len(free)


def _unique(groups: Iterable[Names]) -> list[Names]:
    return list(dict.fromkeys(groups))
