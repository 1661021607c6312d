"""The two states of a move: their descriptions, and the values of their small leaves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opt_core._description.values import (
    LeafDescription,
    StateDescription,
    TransformationDescription,
    TransformationKey,
)
from opt_core._paths import Names
from opt_core._plan.leaves import LeafInfo, Schema, Source, leaf_path

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

    def transformation(self, key: TransformationKey) -> TransformationDescription:
        """Returns a transformation; only its name if it is not described."""
        known = self.description.by_key.get(key)
        return (
            TransformationDescription(key.name, key.number, key.group) if known is None else known
        )

    def before(self, key: TransformationKey) -> Sequence[TransformationDescription]:
        """Returns the transformations before one, in enclosing and nested groups too."""
        earlier: list[TransformationDescription] = []
        for transformation in self.description.transformations:
            if transformation.key == key:
                return earlier
            if is_around(transformation.group, key.group):
                earlier.append(transformation)
        return []

    def leaves_of(self, key: TransformationKey) -> Sequence[int]:
        """Returns the positions of a transformation's leaves."""
        return self._by_transformation.get(key, ())

    def followed(self, key: TransformationKey) -> Sequence[Names]:
        """Returns the parameters that leaves of a transformation follow."""
        params = (self.descriptions[i].parameter for i in self.leaves_of(key))
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
        alike: dict[Any, list[TransformationDescription]] = {}
        for transformation in self.description.transformations:
            alike.setdefault((transformation.group, transformation.name), []).append(transformation)
        return {key: sorted(some, key=lambda one: one.number) for key, some in alike.items()}

    @functools.cached_property
    def _by_transformation(self) -> Mapping[TransformationKey, Sequence[int]]:
        positions: dict[TransformationKey, list[int]] = {}
        for i, leaf in enumerate(self.descriptions):
            positions.setdefault(leaf.kept_by, []).append(i)
        return positions


def is_around(group: Names, other: Names) -> bool:
    """Whether groups are the same, or one of them is inside of the other."""
    shared = min(len(group), len(other))
    return group[:shared] == other[:shared]


def is_recorded(leaf: LeafDescription, transformation: TransformationDescription) -> bool:
    """Whether a leaf is a setting recorded in the state, rather than a result of training.

    Of a transformation that nobody has described, a number may be learnt whatever its name is.
    """
    is_number = leaf.parameter is None and leaf.role == "other"
    is_described = transformation.source != "types"
    return is_number and is_described and leaf.field[-1] in transformation.settings


def holds_parameters(leaf: LeafDescription) -> bool:
    """Whether a leaf belongs to parameters by their order.

    It is a vector of all of them, as in `optax.flatten`, or possibly an entry of a list.
    """
    is_entry = leaf.source == "types" and leaf.role == "other" and leaf.field[-1:] != ()
    is_entry = is_entry and leaf.field[-1].isdigit()
    is_array = bool(leaf.dimensions) and leaf.role in TRAINED and leaf.role != "statistic"
    return leaf.parameter is None and (is_array or is_entry)


def counts_updates(leaf: LeafDescription, transformation: TransformationDescription) -> bool:
    """Whether a leaf counts the updates emitted by a window of mini-steps."""
    windows = {
        bearing.count for bearing in transformation.bearing.values() if bearing.effect == "window"
    }
    is_count = leaf.parameter is None and leaf.role == "count"
    return bool(windows) and is_count and leaf.field not in windows


def has_window(transformation: TransformationDescription) -> bool:
    """Whether it holds partial results until the end of a window or a cycle."""
    return any(bearing.effect == "window" for bearing in transformation.bearing.values())


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
