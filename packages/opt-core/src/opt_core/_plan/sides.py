"""The two states of a move: their descriptions, and the values of their small leaves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from opt_core._description.values import (
    LeafDescription,
    StateDescription,
    TransformationDescription,
)
from opt_core._paths import Names
from opt_core._plan.leaves import LeafInfo, Schema, Source, leaf_path

Made: TypeAlias = tuple[Names, str, int]
"""A transformation: group, name, number."""

TRAINED: Final = frozenset(
    {"moment", "second_moment", "accumulator", "params_copy", "factored", "statistic"}
)
"""Roles of leaves whose values training determines."""


# A raw PRNG key has up to four words, a typed one is a scalar.
_FEW: Final = 4


@dataclasses.dataclass(frozen=True)
class Side:
    """The source of a plan, or its target: what the leaves of transformations are.

    Attributes:
      source: what holds the leaves.
      leaves: those of transformations.
      description: of the state.
    """

    source: Source
    leaves: Sequence[LeafInfo]
    description: StateDescription

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """The names of the leaves."""
        return [leaf.name for leaf in self.leaves]

    @functools.cached_property
    def owners(self) -> Mapping[Names, Names]:
        """The group of every parameter that is trained."""
        return _owners(self.source.schema)

    def value(self, i: int) -> int | None:
        """Returns the value of a leaf that is a single integer; `None` if it is not known."""
        return self.leaves[i].value

    def same(self, positions: Sequence[int]) -> bool | None:
        """Whether leaves have the same value bit for bit; `None` if it is not known."""
        return _are_same([self.leaves[i] for i in positions], self.source)

    @property
    def descriptions(self) -> Sequence[LeafDescription]:
        """The descriptions of the leaves."""
        return self.description.leaves

    def find(self, leaf: LeafDescription, group: Names, number: int) -> int | None:
        """Returns the position of the corresponding leaf in a group, whatever its dimensions."""
        return self._index.get((group, leaf.transformation, number, leaf.field, leaf.parameter))

    def groups(self, *what: Any) -> Sequence[Names]:
        """Returns the groups in which a transformation, a parameter, or both, have leaves."""
        return list(self._groups.get(what, ()))

    def alike(self, group: Names, name: str) -> Sequence[TransformationDescription]:
        """Returns the transformations of one name in a group, by number."""
        return self._alike.get((group, name), ())

    def made(self, which: Made) -> TransformationDescription:
        """Returns a transformation; only its name if it is not described."""
        known = self._made.get(which)
        return TransformationDescription(which[1], which[2], which[0]) if known is None else known

    def line(self, group: Names) -> Sequence[TransformationDescription]:
        """Returns the transformations that act on the parameters of a group, in order."""
        made = self.description.transformations
        return [one for one in made if one.group == group[: len(one.group)]]

    def before(self, which: Made) -> Sequence[TransformationDescription]:
        """Returns the transformations before one, in enclosing and nested groups too."""
        found: list[TransformationDescription] = []
        for made in self.description.transformations:
            if (made.group, made.name, made.number) == which:
                return found
            shared = min(len(made.group), len(which[0]))
            if made.group[:shared] == which[0][:shared]:
                found.append(made)
        return []

    def leaves_of(self, which: Made) -> Sequence[int]:
        """Returns the positions of a transformation's leaves."""
        return self._by_made.get(which, ())

    def followed(self, which: Made) -> Sequence[Names]:
        """Returns the parameters that leaves of a transformation follow."""
        params = (self.descriptions[i].parameter for i in self.leaves_of(which))
        return list(dict.fromkeys(param for param in params if param is not None))

    @functools.cached_property
    def _index(self) -> Mapping[Any, int]:
        return {
            (leaf.group, leaf.transformation, leaf.number, leaf.field, leaf.parameter): i
            for i, leaf in enumerate(self.descriptions)
        }

    @functools.cached_property
    def _groups(self) -> Mapping[Any, Mapping[Names, None]]:
        found: dict[Any, dict[Names, None]] = {}
        for leaf in self.descriptions:
            for what in (
                (leaf.transformation, leaf.parameter),
                (leaf.transformation,),
                (leaf.parameter,),
            ):
                found.setdefault(what, {})[leaf.group] = None
        return found

    @functools.cached_property
    def _alike(self) -> Mapping[Any, Sequence[TransformationDescription]]:
        found: dict[Any, list[TransformationDescription]] = {}
        for made in self.description.transformations:
            found.setdefault((made.group, made.name), []).append(made)
        return {key: sorted(made, key=lambda one: one.number) for key, made in found.items()}

    @functools.cached_property
    def _made(self) -> Mapping[Made, TransformationDescription]:
        return {(m.group, m.name, m.number): m for m in self.description.transformations}

    @functools.cached_property
    def _by_made(self) -> Mapping[Made, Sequence[int]]:
        found: dict[Made, list[int]] = {}
        for i, leaf in enumerate(self.descriptions):
            found.setdefault(made_of(leaf), []).append(i)
        return found


def made_of(leaf: LeafDescription) -> Made:
    """Returns the transformation that a leaf belongs to."""
    return leaf.group, leaf.transformation, leaf.number


def is_recorded(leaf: LeafDescription, made: TransformationDescription) -> bool:
    """Whether a leaf is a setting recorded in the state, rather than a result of training."""
    return leaf.parameter is None and leaf.role == "other" and leaf.field[-1] in made.settings


def holds_parameters(leaf: LeafDescription) -> bool:
    """Whether a leaf belongs to parameters by their order.

    It is a vector of all of them, as in `optax.flatten`, or possibly an entry of a list.
    """
    is_entry = leaf.source == "types" and leaf.role == "other" and leaf.field[-1:] != ()
    is_entry = is_entry and leaf.field[-1].isdigit()
    is_array = bool(leaf.dimensions) and leaf.role in TRAINED and leaf.role != "statistic"
    return leaf.parameter is None and (is_array or is_entry)


def counts_updates(leaf: LeafDescription, made: TransformationDescription) -> bool:
    """Whether a leaf counts the updates emitted by a window of mini-steps."""
    windows = {bearing.count for bearing in made.bearing.values() if bearing.effect == "window"}
    is_count = leaf.parameter is None and leaf.role == "count"
    return bool(windows) and is_count and leaf.field not in windows


def has_window(made: TransformationDescription) -> bool:
    """Whether it holds partial results until the end of a window or a cycle."""
    return any(bearing.effect == "window" for bearing in made.bearing.values())


def shown(made: Made) -> str:
    """Returns a transformation as text: `group/adam#2`."""
    group, name, number = made
    return "/".join([*group, name if number == 1 else f"{name}#{number}"])


def state_leaves(schema: Schema, like: Mapping[str, LeafInfo]) -> list[LeafInfo]:
    """Returns the leaves of transformations; those without a description get that of their name."""
    found = []
    for leaf in schema.leaves:
        if leaf.kind == "state" and not leaf.transformation and leaf.name in like:
            known = like[leaf.name]
            found.append(
                dataclasses.replace(known, shape=leaf.shape, dtype=leaf.dtype, value=leaf.value)
            )
        elif leaf.kind == "state" and leaf.transformation:
            found.append(leaf)
    return found


def side_of(source: Source, leaves: Sequence[LeafInfo], described: Any = None) -> Side:
    """Returns a source as a side, with its own description or that of its schema."""
    if described is None:
        known = tuple(leaf.description for leaf in leaves)
        described = StateDescription(known, source.schema.transformations)
    return Side(source, leaves, described)


def _owners(schema: Schema) -> dict[Names, Names]:
    """The group of every parameter that is trained."""
    if not schema.groups:
        return {leaf.path[1:]: () for leaf in schema.leaves if leaf.kind == "params"}
    return {
        param: group
        for group, params in _trained_groups(schema).items()
        for param in params
        if group is not None
    }


def _trained_groups(schema: Schema) -> dict[Names | None, Sequence[Names]]:
    """The parameters of groups in which transformations act; all others under `None`."""
    acting = {t.group[:n] for t in schema.transformations for n in range(1, len(t.group) + 1)}
    found: dict[Names | None, Sequence[Names]] = {}
    for name, params in schema.groups.items():
        group = leaf_path(name) if leaf_path(name) in acting else None
        found[group] = [*found.get(group, ()), *params]
    return found


def frozen(schema: Schema) -> set[Names]:
    """Returns the parameters known not to be trained: `FROZEN`, or `set_to_zero`."""
    last = {made.group: made.name for made in schema.transformations}
    groups: dict[Names, set[Names]] = {}
    for group, params in _trained_groups(schema).items():
        for param in params:
            groups.setdefault(param, set()).update(() if group is None else (group,))
    for leaf in schema.leaves:
        if leaf.kind == "state" and leaf.parameter is not None and leaf.group:
            groups.setdefault(leaf.parameter, set()).add(leaf.group)
    known = {group for found in groups.values() for group in found}
    # `optax.partition` does not say which parameters are in a group without state for each.
    unknown = {group for group in last if group and group not in known}
    found = {param for param, own in groups.items() if not own}
    for leaf in schema.leaves:
        if leaf.kind == "params":
            own = groups.get(leaf.path[1:])
            names = {last[group] for group in (own or unknown) if group in last}
            found |= {leaf.path[1:]} if names == {"set_to_zero"} else set()
    return found


def _are_same(leaves: Sequence[LeafInfo], source: Source) -> bool | None:
    """Whether leaves have the same value, bit for bit; `None` if that would need reading arrays.

    Counts are in the schema; the source compares others of up to four elements.
    """
    if len(leaves) == 1:
        return True
    values = {leaf.value for leaf in leaves}
    if None not in values:
        return len(values) == 1
    if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
        return False
    if any(leaf.parameter is not None or math.prod(leaf.shape) > _FEW for leaf in leaves):
        return None
    return source.same([leaf.name for leaf in leaves])
