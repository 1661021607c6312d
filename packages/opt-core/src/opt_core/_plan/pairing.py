"""Matching the leaves of a new state with those of an old one, by their descriptions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from opt_core._description import TransformationDescription, TransformationKey, dimensions_text
from opt_core._plan.leaves import LeafInfo, Schema, Source
from opt_core._trees import Names, split_path

TRAINED: Final = frozenset(
    {"moment", "second_moment", "accumulator", "params_copy", "factored", "statistic"}
)
"""Roles of leaves whose values training determines."""


# A raw PRNG key has up to four words, a typed one is a scalar.
_FEW: Final = 4


class Side:
    """The source of a plan, or its target: what the leaves of transformations are.

    Args:
      source: what holds the leaves.
      leaves: those of transformations.
      transformations: in the order in which they act.
      paths: where the leaves are in `param_states`, of a target.
      origins: of a target the parameters of the source that each of its own is computed from, where
        these are others.
    """

    def __init__(
        self,
        source: Source,
        leaves: Sequence[LeafInfo],
        transformations: Sequence[TransformationDescription],
        paths: Sequence[Names] = (),
        origins: Mapping[Names, Sequence[Names]] | None = None,
    ) -> None:
        self.source, self.leaves, self.paths = source, leaves, paths
        self.transformations, self._origins = transformations, origins or {}
        self.names = [leaf.name for leaf in leaves]
        self.owners = _owners(source.schema)
        self._positions: dict[TransformationKey, list[int]] = {}
        self._index: dict[Any, int] = {}
        self._groups: dict[Any, dict[Names, None]] = {}
        for i, leaf in enumerate(leaves):
            name, parameter = leaf.kept_by.name, leaf.parameter
            self._positions.setdefault(leaf.kept_by, []).append(i)
            self._index[(*leaf.kept_by, leaf.field, parameter)] = i
            for what in ((name, parameter), (name,), (parameter,)):
                self._groups.setdefault(what, {})[leaf.group] = None
        self._by_key = {transformation.key: transformation for transformation in transformations}
        self._alike: dict[Any, list[TransformationDescription]] = {}
        for x in sorted(transformations, key=lambda x: x.number):
            self._alike.setdefault((x.group, x.name), []).append(x)

    def same(self, positions: Sequence[int]) -> bool | None:
        """Whether leaves have the same value bit for bit; `None` if that needs reading arrays."""
        # Counts are in the schema; the source compares others of up to four elements.
        if len(positions) == 1:
            return True
        leaves = [self.leaves[i] for i in positions]
        values = {leaf.value for leaf in leaves}
        if None not in values:
            return len(values) == 1
        if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
            return False
        if any(leaf.parameter is not None or math.prod(leaf.shape) > _FEW for leaf in leaves):
            return None
        return self.source.same([leaf.name for leaf in leaves])

    def find(self, leaf: LeafInfo, group: Names, number: int) -> int | None:
        """Returns the position of the corresponding leaf in a group, whatever its dimensions."""
        return self._index.get((group, leaf.kept_by.name, number, leaf.field, leaf.parameter))

    def groups(self, *what: Any) -> Sequence[Names]:
        """Returns the groups in which a transformation, a parameter, or both, have leaves."""
        return list(self._groups.get(what, ()))

    def alike(self, group: Names, name: str) -> Sequence[TransformationDescription]:
        """Returns the transformations of one name in a group, by number."""
        return self._alike.get((group, name), ())

    def keeper(self, leaf: LeafInfo) -> TransformationDescription:
        """Returns the transformation that keeps a leaf."""
        return self.transformation(leaf.kept_by)

    def transformation(self, key: TransformationKey) -> TransformationDescription:
        """Returns a transformation; only its name if it is not described."""
        return self._by_key.get(key) or TransformationDescription(key.name, key.number, key.group)

    def before(self, key: TransformationKey) -> Sequence[TransformationDescription]:
        """Returns the transformations before one, in enclosing and nested groups too."""
        earlier: list[TransformationDescription] = []
        for transformation in self.transformations:
            if transformation.key == key:
                return earlier
            if is_around(transformation.group, key.group):
                earlier.append(transformation)
        return []

    def leaves_of(self, key: TransformationKey) -> Sequence[int]:
        """Returns the positions of a transformation's leaves."""
        return self._positions.get(key, ())

    def followed(self, key: TransformationKey) -> Sequence[Names]:
        """Returns the parameters that leaves of a transformation follow."""
        params = (self.leaves[i].parameter for i in self.leaves_of(key))
        return list(dict.fromkeys(param for param in params if param is not None))

    def came_from(self, param: Names) -> Sequence[Names]:
        """Returns the parameters of the source that one is computed from."""
        return self._origins.get(param, (param,))

    def is_recorded(self, leaf: LeafInfo) -> bool:
        """Whether a leaf is a setting recorded in the state, rather than a result of training."""
        # Of a transformation that nobody has described, a number may be learnt whatever its name.
        is_number = leaf.parameter is None and leaf.role == "other"
        keeper = self.keeper(leaf)
        return is_number and keeper.source != "types" and leaf.field[-1] in keeper.settings

    def holds_parameters(self, leaf: LeafInfo) -> bool:
        """Whether a leaf belongs to parameters by their order; entries of a list may."""
        is_unknown = leaf.parameter is None and leaf.role == "other"
        is_entry = is_unknown and leaf.field[-1:] != () and leaf.field[-1].isdigit()
        return is_concatenated(leaf) or (is_entry and self.keeper(leaf).source == "types")

    def counts_updates(self, leaf: LeafInfo) -> bool:
        """Whether a leaf counts the updates emitted by a window of mini-steps."""
        bearings = self.keeper(leaf).bearing.values()
        windows = {bearing.count for bearing in bearings if bearing.effect == "window"}
        is_count = leaf.parameter is None and leaf.role == "count"
        return bool(windows) and is_count and leaf.field not in windows


def is_around(group: Names, other: Names) -> bool:
    """Whether groups are the same, or one of them is inside of the other."""
    shared = min(len(group), len(other))
    return group[:shared] == other[:shared]


def is_concatenated(leaf: LeafInfo) -> bool:
    """Whether a leaf is a vector of all parameters, as in `optax.flatten`."""
    is_array = bool(leaf.dimensions) and leaf.role in TRAINED and leaf.role != "statistic"
    return leaf.parameter is None and is_array


def has_window(transformation: TransformationDescription) -> bool:
    """Whether it holds partial results until the end of a window or a cycle."""
    return any(bearing.effect == "window" for bearing in transformation.bearing.values())


def source_side(source: Source, like: Schema) -> Side:
    """Returns the side of a source; leaves of no known transformation are those of their names."""
    leaves = []
    for leaf in source.schema.leaves:
        known = like.by_name.get(leaf.name)
        if leaf.kind == "state" and leaf.transformation:
            leaves.append(leaf)
        elif leaf.kind == "state" and known is not None:
            leaves.append(
                dataclasses.replace(known, shape=leaf.shape, dtype=leaf.dtype, value=leaf.value)
            )
    return Side(source, leaves, source.schema.transformations)


def _owners(schema: Schema) -> dict[Names, Names]:
    """The group of every parameter that is trained."""
    if not schema.groups:
        return {leaf.path[1:]: () for leaf in schema.leaves if leaf.kind == "params"}
    return {param: group for param, groups in _training(schema).items() for group in groups}


def _training(schema: Schema) -> dict[Names, set[Names]]:
    """The groups of every parameter in which transformations act; none of a frozen one."""
    acting = {t.group[:n] for t in schema.transformations for n in range(1, len(t.group) + 1)}
    groups: dict[Names, set[Names]] = {}
    for name, params in schema.groups.items():
        for param in params:
            groups.setdefault(param, set()).update({split_path(name)} & acting)
    return groups


def frozen(schema: Schema) -> set[Names]:
    """Returns the parameters known not to be trained: `FROZEN`, or `set_to_zero`."""
    last = {transformation.group: transformation.name for transformation in schema.transformations}
    groups = _training(schema)
    for leaf in schema.leaves:
        if leaf.kind == "state" and leaf.parameter is not None and leaf.group:
            groups.setdefault(leaf.parameter, set()).add(leaf.group)
    # `optax.partition` does not say which parameters are in a group without state for each.
    unknown = {group for group in last if group} - set().union(*groups.values())
    idle = {param for param, training in groups.items() if not training}
    for leaf in schema.leaves:
        if leaf.kind == "params":
            training = groups.get(leaf.path[1:]) or unknown
            if {last[group] for group in training if group in last} == {"set_to_zero"}:
                idle.add(leaf.path[1:])
    return idle


UPDATE: Final = "update"
"""The setting that names the factory of the update function if another one created the state."""


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
            # Different functions may update states of one `init`.
            update, may_differ = one.settings.get(UPDATE), is_like is None and is_one
            like = [x for x in free if may_differ or x.settings.get(UPDATE) == update]
            like = [x for x in like if is_like is None or is_like(x, one)]
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
    """The source of one leaf of the new state."""

    # positions in the old state; several if groups agree, none if it is new
    sources: tuple[int, ...] = ()
    note: str = ""  # why it is new, or a remark
    # for a new leaf, the position of an old leaf of the same name but another meaning
    lookalike: int | None = None
    # for a schedule's new count, the leaf that it continues from
    counts: int | Literal["step"] | None = None


@dataclasses.dataclass
class Pairing:
    """The source of every leaf of a new state: `pairs`; what is `reinitialised`, or `unclear`."""

    old: Side
    new: Side
    ruled: Mapping[int, Sequence[int]]  # sources that rules of the caller decide, by position

    def __post_init__(self) -> None:
        self._numbers: dict[tuple[Names, Names, str], Mapping[int, int]] = {}
        self.unclear: list[str] = []
        leaves = self.new.leaves
        free = [i for i in range(len(leaves)) if i not in self.ruled]
        pairs = {i: self._of_parameter(leaves[i]) for i in free if leaves[i].parameter is not None}
        pairs |= {i: Pair(tuple(places)) for i, places in self.ruled.items()}
        self._pairs = pairs
        shared = {i: self._shared(leaves[i]) for i in free if leaves[i].parameter is None}
        self.reinitialised = dict(self._reinitialised(shared))
        for i in free:
            pairs[i] = self._decided(leaves[i], pairs.get(i), shared.get(i, ()))
        self._give_keys_once(shared)
        for i, leaf in enumerate(leaves):
            if leaf.role == "schedule_count" and not pairs[i].sources and i in shared:
                pairs[i] = dataclasses.replace(pairs[i], counts=self._updates(i))
        self.pairs = list(self._with_notes([pairs[i] for i in range(len(leaves))]))

    def _decided(self, leaf: LeafInfo, own: Pair | None, shared: Sequence[int]) -> Pair:
        is_free = leaf.role in ("schedule_count", "key")
        if own is None and self.new.is_recorded(leaf):
            return self._recorded(leaf, shared)
        if own is None and leaf.role == "schedule_count":
            return self._agreed(shared, leaf)
        if not is_free and (why := self.reinitialised.get(leaf.kept_by, "")):
            return Pair(note=why)
        if own is None and shared and self._holds_others(leaf, self.old.leaves[shared[0]]):
            return Pair(note="it concatenates parameters, and these are not the same")
        return Pair(tuple(shared)) if own is None else own

    def _of_parameter(self, leaf: LeafInfo) -> Pair:
        """The old leaf for one that follows a parameter."""
        sources = self.old.groups(leaf.kept_by.name, leaf.parameter)
        if leaf.group not in sources and len(sources) > 1:
            return Pair(note="several groups have one")
        group = leaf.group if leaf.group in sources else next(iter(sources), None)
        position = None if group is None else self._in(group, leaf)
        if position is None:
            is_other = leaf.group in sources and self._number(leaf.group, leaf) is None
            return Pair(note="no other has its settings" if is_other else "")
        source = self.old.leaves[position]
        is_same = source.dimensions == leaf.dimensions
        if None in (source.dimensions, leaf.dimensions):
            # Their dimensions are not known: only equal settings ensure equal dimensions.
            is_same = _is_alike(self.old.keeper(source), self.new.keeper(leaf))
        was, now = (dimensions_text(x.dimensions) for x in (source, leaf))
        why = f"had the dimensions {was} of its parameter, has {now}"
        return Pair((position,)) if is_same else Pair(note=why, lookalike=position)

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
                self.unclear.append(f"it is not clear which of {many}")
        return self._numbers[key].get(leaf.kept_by.number)

    def _shared(self, leaf: LeafInfo) -> Sequence[int]:
        """The leaves of old groups that may be the source of a leaf of no parameter."""
        positions = (self._in(group, leaf) for group in self._group_sources(leaf))
        return [i for i in positions if i is not None]

    def _group_sources(self, leaf: LeafInfo) -> Sequence[Names]:
        """The groups of the old state with a source for a leaf of no parameter."""
        having = self.old.groups(leaf.kept_by.name)
        where, leaves = leaf.kept_by, self.new.leaves
        own = [i for i in self.new.leaves_of(where) if leaves[i].parameter is not None]
        sources = {self.old.leaves[k].group for i in own for k in self._pairs[i].sources}
        if own and not sources:
            params = [o for param in self.new.followed(where) for o in self.new.came_from(param)]
            sources = {g for param in params for g in self.old.groups(leaf.kept_by.name, param)}
        elif not own:
            # The members of a group within one definition are not always known; its name suffices.
            if leaf.group in having and leaf.group not in self.old.owners.values():
                return [leaf.group]
            params = [o for p in _params(self.new, leaf) for o in self.new.came_from(p)]
            known = [set(self._groups_of(o, having)) for o in params if o in self.old.owners]
            is_whole = bool(known) and all(leaf.group in groups for groups in known)
            sources = {leaf.group} if is_whole else set().union(*known)
        return [group for group in having if group in sources]

    def _holds_others(self, leaf: LeafInfo, source: LeafInfo) -> bool:
        """Whether a leaf concatenates other parameters, or these in another order."""
        if not self.new.holds_parameters(leaf):
            return False
        now = [list(self.new.came_from(param)) for param in _params(self.new, leaf)]
        return now != [[param] for param in _params(self.old, source)]

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
        for i, positions in reversed(list(shared.items())):
            leaf = self.new.leaves[i]
            where = leaf.kept_by
            is_free = leaf.role in ("schedule_count", "key")
            if is_free or not positions or self.new.is_recorded(leaf):
                continue
            if why := self._unlike(positions, leaf):
                yield where, f"reinitialised: {why}"

    def _unlike(self, positions: Sequence[int], leaf: LeafInfo) -> str:
        """Returns how the groups that a leaf comes from disagree; empty if they agree."""
        is_same = self.old.same(positions) if positions else True
        if is_same:
            return ""
        field = "/".join(leaf.field)
        if is_same is None:
            return f"nothing says whether its groups agree about `{field}`"
        known = [x for i in positions if (x := self.old.leaves[i]).value is not None]
        groups = [f"`{'/'.join(x.group)}`" if x.group else "no group" for x in known]
        values = ", ".join(f"{group} {x.value}" for group, x in zip(groups, known, strict=True))
        return f"its groups do not agree about `{field}`{f': {values}' if values else ''}"

    def _recorded(self, leaf: LeafInfo, positions: Sequence[int]) -> Pair:
        """A value that was set at run time continues, unless the setting has changed."""
        name = leaf.field[-1]
        setting = self.new.keeper(leaf).settings.get(name)
        before = [self.old.keeper(self.old.leaves[i]).settings for i in positions]
        if not all(name in settings for settings in before):
            return Pair(tuple(positions), f"saved; nothing says what the code gave as `{name}`")
        for was in (settings[name] for settings in before):
            if was != setting:
                changed = f"`{name}` was {setting_text(was)}, is {setting_text(setting)}"
                return Pair(note=f"{changed} in the code, which acts")
        return self._agreed(positions, leaf)

    def _agreed(self, positions: Sequence[int], leaf: LeafInfo) -> Pair:
        why = self._unlike(positions, leaf)
        return Pair(note=why) if why else Pair(tuple(positions))

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
            if pair.sources and i not in self.ruled:
                source = self.old.leaves[pair.sources[0]]
                if source.group == leaf.group and source.transformation != leaf.transformation:
                    notes.append(f"was `{source.kept_by._replace(group=())}`, by its settings")
            if pair.sources and leaf.role not in ("count", "schedule_count", "key"):
                notes += self._without_effect(leaf, self.old.leaves[pair.sources[0]])
            yield dataclasses.replace(pair, note=", ".join(notes))

    def _without_effect(self, leaf: LeafInfo, source: LeafInfo) -> Iterator[str]:
        one, other = self.old.keeper(source), self.new.keeper(leaf)
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
        side.counts_updates(leaf)
        and side.paths[inner][: len(place)] == place
        and other.transformation != leaf.transformation
        and leaf.group == other.group[: len(leaf.group)]
    )


def _params(side: Side, leaf: LeafInfo) -> Sequence[Names]:
    """The parameters of the transformation of a leaf, or else of its group."""
    if (known := side.keeper(leaf).parameters) is not None:
        return known
    inside = [p for p in side.owners if leaf.group in side.groups(p)]
    return inside or [p for p, owner in side.owners.items() if owner == leaf.group[: len(owner)]]
