"""What may have been renamed since a checkpoint was written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from opt_core import TransformationDescription
from opt_core.state_changes import Move, Side

from opt_checkpoint._naming.schema import leaf_name, numbered, state_path


def suggested_renames(move: Move) -> Iterator[str]:
    """Yields the `Rename` that would keep a state instead of dropping and initialising it.

    Only if exactly one removed and one new transformation agree in fields, shapes and parameters.
    Two known transformations are not the same: Adam's moments are not Adamax's.
    """
    initial = {j for j, pair in enumerate(move.pairs) if not pair.sources and j not in move.ruled}
    gone, new = _looks(move.old, frozenset(move.dropped)), _looks(move.new, initial)
    for after, look in new.items():
        like = [old for old, other in gone.items() if other == look and old.group == after.group]
        is_one = len(like) == 1 and [*new.values()].count(look) == 1
        if is_one and "stated" not in (like[0].source, after.source):
            yield _suggestion(like[0], after)


def _looks(side: Side, chosen: Collection[int]) -> Mapping[TransformationDescription, Any]:
    """Fields, parameters and shapes of the transformations of which all leaves are chosen."""
    found = {}
    for made in side.description.transformations:
        own = side.leaves_of((made.group, made.name, made.number))
        if own and all(i in chosen for i in own):
            looks = (
                (side.descriptions[i].field, side.descriptions[i].parameter, side.leaves[i].shape)
                for i in own
            )
            found[made] = frozenset(looks)
    return found


def _suggestion(old: TransformationDescription, new: TransformationDescription) -> str:
    was, now = numbered(old.name, old.number), numbered(new.name, new.number)
    pattern = re.escape(leaf_name(state_path(new.group, now))).replace("\\#", "#") + "/(.*)"
    source = leaf_name(state_path(old.group, was)).replace("\\", "\\\\") + "/\\1"
    return (
        f"`{now}` may be the former `{was}`: their states look the same. If so, say: "
        f"`rules=[(r'{pattern}', Rename(r'{source}'))]`"
    )
