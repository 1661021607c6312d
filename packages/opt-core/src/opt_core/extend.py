"""What packages that build on opt-core use of it; may change with any release, as `jax.extend`."""

from opt_core._dtypes import all_survive, convert_held
from opt_core._paths import Names
from opt_core._plan.destinations import with_placement
from opt_core._plan.functions import abstract, key_kind
from opt_core._plan.match import Request, make_plan
from opt_core._plan.names import (
    NamedState,
    count_of,
    is_wide,
    leaf_info,
    local,
    named_leaves,
    named_state,
    named_view,
    update_counts,
)
from opt_core._plan.placement import committed_sharding, placed
from opt_core._plan.plan import Plan, Row, aligned, leaf_bytes
from opt_core._plan.rules import (
    KINDS,
    Map,
    Pad,
    Policy,
    Rename,
    Rule,
    Stack,
    Unstack,
    check_allowances,
)
from opt_core._plan.schema import (
    HasShardings,
    LeafInfo,
    Schema,
    Source,
    leaf_name,
    leaf_path,
    shown,
)
from opt_core._plan.view import View

__all__ = [
    "KINDS",
    "HasShardings",
    "LeafInfo",
    "Map",
    "NamedState",
    "Names",
    "Pad",
    "Plan",
    "Policy",
    "Rename",
    "Request",
    "Row",
    "Rule",
    "Schema",
    "Source",
    "Stack",
    "Unstack",
    "View",
    "abstract",
    "aligned",
    "all_survive",
    "check_allowances",
    "committed_sharding",
    "convert_held",
    "count_of",
    "is_wide",
    "key_kind",
    "leaf_bytes",
    "leaf_info",
    "leaf_name",
    "leaf_path",
    "local",
    "make_plan",
    "named_leaves",
    "named_state",
    "named_view",
    "placed",
    "shown",
    "update_counts",
    "with_placement",
]
