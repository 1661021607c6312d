"""Transformations that may have been renamed: their states look the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from opt_core import TransformationDescription

from opt_checkpoint._naming.schema import Names, Schema, leaf_name, numbered
from opt_checkpoint._planning.plan import Row
from opt_checkpoint._planning.rules import Policy

_Look = frozenset[tuple[Names, Names | None, tuple[int, ...]]]


def suggested_renames(
    saved: Schema, target: Schema, rows: Sequence[Row], policy: Policy
) -> Iterator[str]:
    """Yields the `Rename` that would keep a state which would be dropped and initialised.

    Only where exactly one transformation that is gone and one that is new agree in fields, shapes
    and parameters. Two that are known by name are not the same: Adam's moments are not Adamax's.

    Args:
      saved: of the checkpoint.
      target: of the target.
      rows: what becomes of the leaves of the target.
      policy: a leaf that a rule names is not asked about.
    """
    used = {name for row in rows for name in row.sources}
    anew = {row.leaf.name for row in rows if row.action == "initialised"}
    ruled = {row.leaf.name for row in rows if policy.rule(row.leaf.name) is not None}
    gone = _looks(saved, {leaf.name for leaf in saved.leaves} - used)
    new = _looks(target, anew - ruled)
    for (group, name), look in new.items():
        like = [old for old, other in gone.items() if other == look and old[0] == group]
        if len(like) != 1 or list(new.values()).count(look) != 1:
            continue
        before = _found(saved, like[0])
        after = _found(target, (group, name))
        if before is None or after is None or "stated" in (before.source, after.source):
            continue
        yield _suggestion(before, after)


def _looks(schema: Schema, names: Collection[str]) -> Mapping[tuple[Names, str], _Look]:
    """The fields, parameters and shapes of transformations of which all leaves are named."""
    found: dict[tuple[Names, str], set[tuple[Names, Names | None, tuple[int, ...]]]] = {}
    others = set()
    for leaf in schema.leaves:
        if leaf.kind == "state" and leaf.transformation:
            where = leaf.group, leaf.transformation
            if leaf.name not in names:
                others.add(where)
            found.setdefault(where, set()).add((leaf.field, leaf.parameter, leaf.shape))
    return {where: frozenset(look) for where, look in found.items() if where not in others}


def _found(schema: Schema, where: tuple[Names, str]) -> TransformationDescription | None:
    return next((t for t in schema.transformations if (t.group, numbered(t)) == where), None)


def _prefix(made: TransformationDescription) -> str:
    groups = [part for label in made.group for part in ("groups", label)]
    return leaf_name(("state", *groups, numbered(made)))


def _suggestion(old: TransformationDescription, new: TransformationDescription) -> str:
    before, after = _prefix(old), _prefix(new)
    pattern = re.escape(after).replace("\\#", "#") + "/(.*)"
    source = before.replace("\\", "\\\\") + "/\\1"
    told = (
        f"`{numbered(new)}` may be what `{numbered(old)}` was: their states look the same. If it "
        f"is, say so: `rules=[(r'{pattern}', Rename(r'{source}'))]`"
    )
    if new.name != old.name:
        told += f", or `aliases={{'{new.name}': '{old.name}'}}` in the definition"
    return told
