"""Transformations that may have been renamed: their states look the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from opt_core import TransformationDescription
from opt_core.state_changes import Move, Side

from opt_checkpoint._naming.schema import leaf_name, numbered


def suggested_renames(move: Move) -> Iterator[str]:
    """Yields the `Rename` that would keep a state which would be dropped and initialised.

    Only where exactly one transformation that is gone and one that is new agree in fields, shapes
    and parameters. Two that are known by name are not the same: Adam's moments are not Adamax's.
    """
    anew = {j for j, pair in enumerate(move.pairs) if not pair.sources and j not in move.ruled}
    gone, new = _looks(move.old, frozenset(move.dropped)), _looks(move.new, anew)
    for after, look in new.items():
        like = [old for old, other in gone.items() if other == look and old.group == after.group]
        is_one = len(like) == 1 and [*new.values()].count(look) == 1
        if is_one and "stated" not in (like[0].source, after.source):
            yield _suggestion(like[0], after)


def _looks(side: Side, chosen: Collection[int]) -> Mapping[TransformationDescription, Any]:
    """The fields, parameters and shapes of transformations of which all leaves are chosen."""
    found = {}
    for made in side.description.transformations:
        own = side.leaves_of((made.group, made.name, made.number))
        if own and all(i in chosen for i in own):
            told = ((side.told[i].field, side.told[i].parameter, side.leaves[i].shape) for i in own)
            found[made] = frozenset(told)
    return found


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
