"""Restores between ways of storing one state: everything as it would be in plain float32.

Where a checkpoint and a target store leaves differently, both are planned without that: codes and
scales are the leaf that they stand for, a parameter with its remainder is one of float32. Rules,
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

from opt_core._optimizer import Optimizer
from opt_core._plan.leaves import HasShardings, LeafInfo, Schema, Source, View, named_view
from opt_core._plan.plan import Plan, Row
from opt_core._plan.rules import Permissions, abstract
from opt_core._shardings import placed
from opt_core._storage import EXTRAS, PlainOptimizer, decode, join, stored_as
from opt_core.errors import LeafError

_SCALE = "scale"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Parts:
    """The arrays that a leaf is stored in.

    Attributes:
      how: a key of `Schema.storage`, or a word of `opt_core._storage.EXTRAS`.
      names: of the arrays: codes and scale, or the parameter and what is kept besides it.
    """

    how: str
    names: tuple[str, ...]


class PlainSource:
    """A checkpoint with every leaf as it would be in float32; see `Source`.

    Args:
      source: the checkpoint.

    Raises:
      LeafError: codes of a kind that is not known here.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._saved = source.schema.by_name
        self.parts: dict[str, Parts] = {}
        extras = {leaf.parameter: leaf for leaf in self._saved.values() if leaf.stored in EXTRAS}
        leaves: list[LeafInfo] = []
        for leaf in source.schema.leaves:
            if leaf.kind == "params" and (extra := extras.get(leaf.path[1:])) is not None:
                self.parts[leaf.name] = Parts(extra.stored, (leaf.name, extra.name))
                leaves.append(dataclasses.replace(leaf, dtype="float32"))
            elif not leaf.stored:
                leaves.append(leaf)
            elif leaf.stored not in EXTRAS and leaf.field[-1] != _SCALE:
                leaves.append(self._of_codes(leaf))
        self.schema = dataclasses.replace(source.schema, leaves=tuple(leaves), storage={})

    def _of_codes(self, leaf: LeafInfo) -> LeafInfo:
        data = self._source.schema.storage[leaf.stored]
        if data["version"] != _VERSION:
            raise LeafError(
                f"`{leaf.name}` is stored as {leaf.stored!r}, which this release cannot read: it "
                f"knows version {_VERSION}"
            )
        at = len(leaf.path) - len(leaf.parameter or ()) - 1
        before, after = leaf.path[:at], leaf.path[at + 1 :]
        same = tuple(range(len(leaf.shape)))
        made = dataclasses.replace(
            leaf, path=(*before, *after), dtype=data["dtype"], stored="", dimensions=same
        )
        scales = [dataclasses.replace(leaf, path=(*before, _SCALE, *after))] * bool(data["block"])
        self.parts[made.name] = Parts(leaf.stored, tuple(x.name for x in (leaf, *scales)))
        return made

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
            name: self._made(self.parts[name], place, read) if name in self.parts else read[name]
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

    def _made(self, parts: Parts, place: jax.ShapeDtypeStruct, read: Mapping[str, Any]) -> Any:
        arrays = [jnp.asarray(read[name]) for name in parts.names]
        if parts.how in EXTRAS:
            return placed(join(parts.how, *arrays), place.sharding)
        return placed(decode(self._source.schema.storage[parts.how], *arrays), place.sharding)

    def carried(self, row: Row, how: str, places: Sequence[Any]) -> list[Any] | None:
        """Returns the arrays of a leaf that is stored in this way, and that nothing changes."""
        if row.how or len(row.sources) != 1 or "reshape" in row.kinds:
            return None
        parts = self.parts.get(row.sources[0])
        if parts is None or parts.how != how:
            return None
        rows = zip(parts.names, places, strict=True)
        read = self._source.read({x: abstract(self._saved[x], place) for x, place in rows})
        return [jnp.asarray(read[name]) for name in parts.names]


def plain_sides(source: Source, view: View, permissions: Permissions) -> tuple[Source, View]:
    """Returns both sides as they would be in float32; as they are where they store leaves alike."""
    given = _ways(source.schema)
    if not given and not any(stored_as(view.optimizer.state.param_states)):
        return source, view
    if given == _ways(named_view(view).schema) and not permissions.rules:
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
    of_state = carry[len(carry) - len(stored.of_state) :]
    return stored.stored_again(optimizer, carry[: len(stored.of_params)], of_state)


def with_ways(
    rows: Sequence[Row], source: Source, view: View, permissions: Permissions
) -> list[Row]:
    """Says of each leaf how it was stored and is now; what loses digits has to be admitted."""
    if view.stored is None or not isinstance(source, PlainSource):
        return [*rows]
    of_params, of_state = view.stored.of_params, view.stored.of_state
    between = [""] * (len(rows) - len(of_params) - len(of_state))
    return [
        _with_way(row, how, source, permissions) if row.sources else row
        for row, how in zip(rows, [*of_params, *between, *of_state], strict=True)
    ]


def _with_way(row: Row, how: str, source: PlainSource, permissions: Permissions) -> Row:
    found = [source.parts[name].how for name in row.sources if name in source.parts]
    was = found[0] if found else ""
    if was == how:
        return row
    note = f"{_codec(was) or row.leaf.dtype} -> {_codec(how) or row.leaf.dtype}"
    kinds = row.kinds
    if row.leaf.kind == "params":
        plain = [name for name in row.sources if name not in source.parts]
        if how in ("remainder", "kahan") and plain and "cast" in row.kinds:
            note = f"saved without its {how}, which is reset"
        is_cast = how == "kahan" and was != "kahan"
    else:
        is_cast = True
    is_admitted = row.is_admitted
    if is_cast and "cast" not in kinds:
        kinds = (*kinds, "cast")
        rule = permissions.rule(row.leaf.name)
        is_admitted &= "cast" in permissions.allow or (rule is not None and rule[1] == "cast")
    notes = ", ".join(filter(None, (row.note, note)))
    return dataclasses.replace(
        row, kinds=kinds, action="converted", note=notes, is_admitted=is_admitted
    )


def _codec(way: str) -> str:
    """The name of a codec, or the word for what is kept besides a parameter."""
    return way.partition("-v")[0]
