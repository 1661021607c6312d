"""What becomes of a state under another definition: pairs of leaves, and what stands in the way.

Surgery in memory and restores from checkpoints share these rules. Both provide two `Side`s: the
description of a state and the values of its small leaves. `pair_leaves` finds the source of each
leaf of the new state. For the resulting `Move`, `refusals` are the problems that nothing admits;
`switches` and `statistics` those that `allow={'optimizer'}` admits. A restore, which is strict
about the optimizer too, asks for the same where there are `differences`.
"""

from opt_core._dtypes import all_survive, convert_held
from opt_core._surgery.changes import (
    Action,
    Allowance,
    ChangeReport,
    LeafChange,
    check_allowances,
)
from opt_core._surgery.differences import differences, inside
from opt_core._surgery.hazards import (
    Move,
    Refusal,
    bearing_of,
    earlier_changes,
    refusals,
    statistics,
    switches,
)
from opt_core._surgery.likes import like_numbers, shared_settings, without_code
from opt_core._surgery.pairing import STEP, Pair, Pairing, pair_leaves
from opt_core._surgery.placement import Places, committed_sharding, init_leaves, placed
from opt_core._surgery.sides import Made, Side, holds_parameters, made_of

__all__ = [
    "STEP",
    "Action",
    "Allowance",
    "ChangeReport",
    "LeafChange",
    "Made",
    "Move",
    "Pair",
    "Pairing",
    "Places",
    "Refusal",
    "Side",
    "all_survive",
    "bearing_of",
    "check_allowances",
    "committed_sharding",
    "convert_held",
    "differences",
    "earlier_changes",
    "holds_parameters",
    "init_leaves",
    "inside",
    "like_numbers",
    "made_of",
    "pair_leaves",
    "placed",
    "refusals",
    "shared_settings",
    "statistics",
    "switches",
    "without_code",
]
