"""Restores between ways of storing one state: everything as it would be in plain float32.

Where a checkpoint and a target store leaves differently, both are planned without that: arrays
are the leaf that they stand for, a parameter with what is kept besides it is one of float32. Rules,
groups and other transformations then work as ever. What both store alike is carried bit by bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from opt_core._arrays import placed
from opt_core._optimizer import Optimizer
from opt_core._paths import path_str
from opt_core._plan.leaves import (
    HasShardings,
    LeafInfo,
    NamedState,
    Schema,
    Source,
    View,
)
from opt_core._plan.plan import Plan, Row
from opt_core._plan.rules import Permissions, abstract
from opt_core._storage import PlainOptimizer, read_storage
from opt_core.protocols import Storage


@dataclasses.dataclass(frozen=True)
class Parts:
    """The names of the arrays that a leaf is stored in, and what they mean."""

    how: Storage
    names: tuple[str, ...]


class PlainSource:
    """A checkpoint with every leaf as it would be in float32; see `Source`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._saved = source.schema.by_name
        self.parts: dict[str, Parts] = {}
        ways = _read_storages(source.schema)
        extras = {
            leaf.parameter: leaf
            for leaf in source.schema.leaves
            if leaf.stored and not ways[leaf.stored].fields
        }
        leaves: list[LeafInfo] = []
        for leaf in source.schema.leaves:
            if leaf.kind == "params" and (extra := extras.get(leaf.path[1:])) is not None:
                how = ways[extra.stored]
                self.parts[leaf.name] = Parts(how, (leaf.name, extra.name))
                leaves.append(dataclasses.replace(leaf, dtype=how.dtype))
            elif not leaf.stored:
                leaves.append(leaf)
            elif () != leaf.field[-1:] == ways[leaf.stored].fields[:1]:
                leaves.append(self._of_arrays(leaf, ways[leaf.stored]))
        self.schema = dataclasses.replace(source.schema, leaves=tuple(leaves), storage={})

    def _of_arrays(self, leaf: LeafInfo, how: Storage) -> LeafInfo:
        """The leaf that arrays in one node stand for, by the first of them."""
        at = len(leaf.path) - len(leaf.parameter or ()) - 1
        before, after = leaf.path[:at], leaf.path[at + 1 :]
        same = tuple(range(len(leaf.shape)))
        plain = dataclasses.replace(
            leaf, path=(*before, *after), dtype=how.dtype, stored="", dimensions=same
        )
        names = (path_str((*before, field, *after)) for field in how.fields)
        self.parts[plain.name] = Parts(how, tuple(names))
        return plain

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns leaves where they are wanted; see `Source.read`."""
        raw: dict[str, jax.ShapeDtypeStruct] = {}
        for name, place in wanted.items():
            if name not in self.parts:
                raw[name] = place
                continue
            for part in self.parts[name].names:
                sharding = place.sharding
                if self._saved[part].shape != place.shape and isinstance(sharding, NamedSharding):
                    sharding = sharding.update(spec=PartitionSpec())
                raw[part] = abstract(self._saved[part], sharding)
        read = self._source.read(raw)
        return {
            name: self._decoded(self.parts[name], place, read) if name in self.parts else read[name]
            for name, place in wanted.items()
        }

    def same(self, names: Iterable[str]) -> bool | None:
        """Whether leaves are the same bit for bit; see `Source.same`."""
        return None if any(name in self.parts for name in names) else self._source.same(names)

    def shardings(self, names: Iterable[str]) -> Mapping[str, Sharding]:
        """Returns where the leaves were, by name: those of codes are where the codes were."""
        if not isinstance(self._source, HasShardings):
            return {}
        first = {name: self.parts[name].names[0] if name in self.parts else name for name in names}
        found = self._source.shardings(first.values())
        return {name: found[part] for name, part in first.items() if part in found}

    def _decoded(self, parts: Parts, place: jax.ShapeDtypeStruct, read: Mapping[str, Any]) -> Any:
        arrays = [jnp.asarray(read[name]) for name in parts.names]
        return placed(parts.how.decode(*arrays), place.sharding)

    def carried(self, row: Row, how: Storage, places: Sequence[Any]) -> list[Any] | None:
        """Returns the arrays of a leaf that is stored in this way, and that nothing changes."""
        if row.how is not None or len(row.sources) != 1 or "reshape" in row.kinds:
            return None
        parts = self.parts.get(row.sources[0])
        if parts is None or parts.how != how:
            return None
        rows = zip(parts.names, places, strict=True)
        read = self._source.read({x: abstract(self._saved[x], place) for x, place in rows})
        return [jnp.asarray(read[name]) for name in parts.names]


def _read_storages(schema: Schema) -> dict[str, Storage]:
    """How leaves are stored, by the words of `LeafInfo.stored`; an error names a leaf."""
    first: dict[str, str] = {}
    for leaf in schema.leaves:
        if leaf.stored:
            first.setdefault(leaf.stored, leaf.name)
    return {
        how: read_storage(schema.storage[how], f"`{name}` is stored as {how!r}")
        for how, name in first.items()
    }


def plain_sides(
    source: Source, view: View, named: NamedState, permissions: Permissions
) -> tuple[Source, View]:
    """Returns both sides as they would be in float32; as they are where they store leaves alike."""
    if _ways(source.schema) == _ways(named.schema) and not permissions.rules:
        return source, view
    stored = PlainOptimizer(view.optimizer)
    return PlainSource(source), dataclasses.replace(view, optimizer=stored.optimizer, stored=stored)


def _ways(schema: Schema) -> set[tuple[str, str]]:
    """Which leaves stand for others, and how."""
    return {(leaf.name, leaf.stored) for leaf in schema.leaves if leaf.stored}


def stored_again(plan: Plan[Any], optimizer: Optimizer) -> Optimizer:
    """Returns what was restored, stored as the target stores it."""
    source, stored = plan.source, plan.view.stored
    if stored is None or not isinstance(source, PlainSource):
        return optimizer
    carry = [functools.partial(source.carried, row) for row in plan.target_rows]
    return stored.stored_again(optimizer, carry)


def with_ways(
    rows: Sequence[Row], source: Source, stored: PlainOptimizer, permissions: Permissions
) -> list[Row]:
    """Says of each leaf how it was stored and is now; what loses digits has to be admitted."""
    if not isinstance(source, PlainSource):
        return [*rows]
    pairs = zip(rows, stored.ways(len(rows)), strict=True)
    return [_with_way(row, how, source, permissions) if row.sources else row for row, how in pairs]


def _with_way(row: Row, how: Storage | None, source: PlainSource, permissions: Permissions) -> Row:
    known = [source.parts[name].how for name in row.sources if name in source.parts]
    was = known[0] if known else None
    if was == how:
        return row
    before, after = (x.name if x else row.leaf.dtype for x in (was, how))
    note, is_cast = f"{before} -> {after}", True
    if row.leaf.kind == "params":
        is_cast = how is not None and not how.is_exact
        if how is not None and "cast" in row.kinds and len(known) < len(row.sources):
            note = f"saved without its {how.name}, which is reset"
    kinds, is_admitted = row.kinds, row.is_admitted
    if is_cast and "cast" not in kinds:
        kinds = (*kinds, "cast")
        rule = permissions.rule(row.leaf.name)
        is_admitted &= "cast" in permissions.allow or (rule is not None and rule[1] == "cast")
    notes = ", ".join(filter(None, (row.note, note)))
    return dataclasses.replace(
        row, kinds=kinds, action="converted", note=notes, is_admitted=is_admitted
    )
