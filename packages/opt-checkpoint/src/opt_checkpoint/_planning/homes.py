"""From which groups of a checkpoint the parameters of a group come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from opt_checkpoint._naming.schema import (
    LeafInfo,
    Names,
    Schema,
    Source,
    leaf_name,
    leaf_path,
)
from opt_checkpoint._planning.scalars import are_same

Key = tuple[str, Names, Names | None]
"""A leaf of a state apart from its group: transformation, field, parameter."""


def key_of(leaf: LeafInfo) -> Key:
    """Returns what leaves have in common that differ in their groups only."""
    return leaf.transformation, leaf.field, leaf.parameter


class Homes:
    """Where the groups of a target find their state in a checkpoint.

    Args:
      source: the checkpoint.
      target: what is to be restored.
      origins: for each parameter of the target those of the checkpoint that it comes from.
    """

    def __init__(
        self, source: Source, target: Schema, origins: Mapping[Names, Sequence[Names]]
    ) -> None:
        saved = source.schema
        self._source, self._origins = source, origins
        self.by_key: dict[Key, list[LeafInfo]] = {}
        self._keepers: dict[tuple[str, Names], list[Names]] = {}
        self._groups: dict[str, list[Names]] = {}
        for leaf in _state(saved):
            self.by_key.setdefault(key_of(leaf), []).append(leaf)
            _add(self._groups.setdefault(leaf.transformation, []), leaf.group)
            if leaf.parameter is not None:
                _add(
                    self._keepers.setdefault((leaf.transformation, leaf.parameter), []), leaf.group
                )
        self._per_parameter = {transformation for transformation, _ in self._keepers}
        self._table = _groups_of_params(saved)
        self._members, self._were_members = _members(target), _members(saved)
        self._found: dict[tuple[Names, str], list[Names]] = {}

    def of(self, group: Names, transformation: str) -> list[Names]:
        """Returns the groups of the checkpoint that have the state for a group of the target."""
        key = group, transformation
        if key not in self._found:
            found: list[Names] = []
            origins = [
                o for param in self._members.get(group, ()) for o in self._origins.get(param, ())
            ]
            for origin in origins:
                for home in self._of_param(origin, transformation):
                    _add(found, home)
            self._found[key] = [group] if self._stays(group, transformation, origins) else found
        return self._found[key]

    def _stays(self, group: Names, transformation: str, origins: Sequence[Names]) -> bool:
        """Whether all parameters of a group were in it before: what is around it is no home."""
        if not origins or group not in self._groups.get(transformation, ()):
            return False
        if not set(self._were_members.get(group, ())).issuperset(origins):
            return False
        homes = [self._keepers.get((transformation, origin), []) for origin in origins]
        # Another group may have kept what this one has for all: two masks become one.
        return all(group in found for found in homes if found) or not any(
            group in found for (name, _), found in self._keepers.items() if name == transformation
        )

    def _of_param(self, param: Names, transformation: str) -> Sequence[Names]:
        if transformation in self._per_parameter:
            return self._keepers.get((transformation, param), ())
        having = self._groups.get(transformation, [])
        known = self._table.get(param)
        # `optax.partition` does not say who is in a group where nothing is kept per parameter.
        return having if known is None else [g for g in having if not g or g in known]

    def disagreements(self, target: Schema) -> dict[tuple[Names, str], str]:
        """Returns the transformations of groups that have to start anew, and why."""
        found: dict[tuple[Names, str], str] = {}
        for leaf in _state(target):
            where = leaf.group, leaf.transformation
            if leaf.parameter is not None or where in found:
                continue
            homes = self.of(*where)
            given = [c for c in self.by_key.get(key_of(leaf), []) if c.group in homes]
            if given and not (is_same := are_same(given, self._source)):
                field = leaf_name(leaf.field)
                why = f"its groups do not agree about `{field}`"
                if is_same is None:
                    why = f"nothing says whether its groups agree about `{field}`"
                told = ", ".join(
                    f"{_shown(c.group)} {c.value}" for c in given if c.value is not None
                )
                found[where] = f"anew: {why}{f': {told}' if told else ''}"
        return found

    def are_agreed(self, leaves: Sequence[LeafInfo]) -> bool:
        """Whether leaves of the checkpoint are known to have one value."""
        return bool(are_same(leaves, self._source))


def frozen(schema: Schema) -> set[Names]:
    """Returns the parameters that are known not to be trained: `FROZEN`, or `set_to_zero`."""
    last = {made.group: made.name for made in schema.transformations}
    table = _groups_of_params(schema)
    known = {group for groups in table.values() for group in groups}
    # `optax.partition` does not say who is in a group where nothing is kept per parameter.
    unknown = [group for group in last if group and group not in known]
    found: set[Names] = set()
    for leaf in schema.leaves:
        if leaf.kind != "params" or leaf.parameter is None:
            continue
        groups = table.get(leaf.parameter)
        inner = [group for group in groups or () if group in last]
        if groups == []:
            found.add(leaf.parameter)
        elif names := {last[group] for group in inner or unknown}:
            found |= {leaf.parameter} if names == {"set_to_zero"} else set()
    return found


def _shown(group: Names) -> str:
    return f"`{leaf_name(group)}`" if group else "no group"


def _state(schema: Schema) -> Iterator[LeafInfo]:
    return (leaf for leaf in schema.leaves if leaf.kind == "state" and leaf.transformation)


def _groups_of_params(schema: Schema) -> dict[Names, list[Names]]:
    """The groups that each parameter is known to be in; frozen parameters are in none."""
    found: dict[Names, list[Names]] = {}
    trained = {t.group[:n] for t in schema.transformations for n in range(1, len(t.group) + 1)}
    for name, params in schema.groups.items():
        group = leaf_path(name)
        for param in params:
            groups = found.setdefault(param, [])
            if group in trained:
                _add(groups, group)
    for leaf in _state(schema):
        if leaf.parameter is not None:
            for n in range(1, len(leaf.group) + 1):
                _add(found.setdefault(leaf.parameter, []), leaf.group[:n])
    return found


def _members(schema: Schema) -> dict[Names, list[Names]]:
    """The parameters of every group; all of them where there are no groups."""
    params = [leaf.parameter for leaf in schema.leaves if leaf.kind == "params"]
    known = _groups_of_params(schema)
    found: dict[Names, list[Names]] = {(): [param for param in params if param is not None]}
    for param, groups in known.items():
        for group in groups:
            _add(found.setdefault(group, []), param)
    for leaf in _state(schema):  # those of `optax.partition` that keep nothing per parameter
        if leaf.group and leaf.group not in found:
            outer = found[()] if len(leaf.group) == 1 else found.get(leaf.group[:-1], found[()])
            found[leaf.group] = [param for param in outer if not known.get(param)] or outer
    return found


def _add(found: list[Names], names: Names) -> None:
    if names not in found:
        found.append(names)
