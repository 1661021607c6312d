"""The two states of a move: their descriptions, and the values of their small leaves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opt_core._description import (
    TransformationDescription,
    TransformationKey,
)
from opt_core._paths import Names, split_path
from opt_core._plan.leaves import LeafInfo, Schema, Source

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
      transformations: in the order in which they act.
      paths: where the leaves are in `param_states`, of a target.
    """

    source: Source
    leaves: Sequence[LeafInfo]
    transformations: Sequence[TransformationDescription]
    paths: Sequence[Names] = ()

    @functools.cached_property
    def names(self) -> Sequence[str]:
        """The names of the leaves."""
        return [leaf.name for leaf in self.leaves]

    @functools.cached_property
    def owners(self) -> Mapping[Names, Names]:
        """The group of every parameter that is trained."""
        return _owners(self.source.schema)

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
        return self._by_transformation.get(key, ())

    def followed(self, key: TransformationKey) -> Sequence[Names]:
        """Returns the parameters that leaves of a transformation follow."""
        params = (self.leaves[i].parameter for i in self.leaves_of(key))
        return list(dict.fromkeys(param for param in params if param is not None))

    @functools.cached_property
    def _by_key(self) -> Mapping[TransformationKey, TransformationDescription]:
        return {transformation.key: transformation for transformation in self.transformations}

    @functools.cached_property
    def _index(self) -> Mapping[Any, int]:
        return {
            (*leaf.kept_by, leaf.field, leaf.parameter): i for i, leaf in enumerate(self.leaves)
        }

    @functools.cached_property
    def _groups(self) -> Mapping[Any, Mapping[Names, None]]:
        found: dict[Any, dict[Names, None]] = {}
        for leaf in self.leaves:
            for what in (
                (leaf.kept_by.name, leaf.parameter),
                (leaf.kept_by.name,),
                (leaf.parameter,),
            ):
                found.setdefault(what, {})[leaf.group] = None
        return found

    @functools.cached_property
    def _alike(self) -> Mapping[Any, Sequence[TransformationDescription]]:
        alike: dict[Any, list[TransformationDescription]] = {}
        for transformation in self.transformations:
            alike.setdefault((transformation.group, transformation.name), []).append(transformation)
        return {key: sorted(some, key=lambda one: one.number) for key, some in alike.items()}

    @functools.cached_property
    def _by_transformation(self) -> Mapping[TransformationKey, Sequence[int]]:
        positions: dict[TransformationKey, list[int]] = {}
        for i, leaf in enumerate(self.leaves):
            positions.setdefault(leaf.kept_by, []).append(i)
        return positions


def is_around(group: Names, other: Names) -> bool:
    """Whether groups are the same, or one of them is inside of the other."""
    shared = min(len(group), len(other))
    return group[:shared] == other[:shared]


def is_recorded(leaf: LeafInfo, transformation: TransformationDescription) -> bool:
    """Whether a leaf is a setting recorded in the state, rather than a result of training."""
    # Of a transformation that nobody has described, a number may be learnt whatever its name is.
    is_number = leaf.parameter is None and leaf.role == "other"
    is_described = transformation.source != "types"
    return is_number and is_described and leaf.field[-1] in transformation.settings


def is_concatenated(leaf: LeafInfo) -> bool:
    """Whether a leaf is a vector of all parameters, as in `optax.flatten`."""
    is_array = bool(leaf.dimensions) and leaf.role in TRAINED and leaf.role != "statistic"
    return leaf.parameter is None and is_array


def holds_parameters(leaf: LeafInfo, transformation: TransformationDescription) -> bool:
    """Whether a leaf belongs to parameters by their order; entries of a list may."""
    is_unknown = leaf.parameter is None and leaf.role == "other"
    is_entry = is_unknown and leaf.field[-1:] != () and leaf.field[-1].isdigit()
    return is_concatenated(leaf) or (is_entry and transformation.source == "types")


def counts_updates(leaf: LeafInfo, transformation: TransformationDescription) -> bool:
    """Whether a leaf counts the updates emitted by a window of mini-steps."""
    windows = {
        bearing.count for bearing in transformation.bearing.values() if bearing.effect == "window"
    }
    is_count = leaf.parameter is None and leaf.role == "count"
    return bool(windows) and is_count and leaf.field not in windows


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
        group = split_path(name) if split_path(name) in acting else None
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
