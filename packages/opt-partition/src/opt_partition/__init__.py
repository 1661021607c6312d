"""Sharding of any optimizer state, derived from the logical axes of the parameters.

*Logical axes* name the dimensions of a parameter. *Rules* map these names to mesh axes. *Specs* are
`PartitionSpec`s of mesh axes, and a *layout* describes how every leaf of a tree is sharded over a
mesh.
"""

from importlib.metadata import version as _version

from opt_partition import errors
from opt_partition._collectives import Collective
from opt_partition._explain import Explanation, Row, derive_logical_axes, explain
from opt_partition._init import init_sharded
from opt_partition._judge import Finding, Unjudged
from opt_partition._layout import Layout, LeafLayout
from opt_partition._leaves import Expected, LeafReport
from opt_partition._logical_to_mesh import logical_to_mesh
from opt_partition._memory_plan import memory_plan
from opt_partition._param_axes import Parameter, normalise_param_axes
from opt_partition._plan import MemoryPlan, PlanRow
from opt_partition._rules import ASK, Rules, StateLeaf
from opt_partition._t5x import OptaxStatePartitionRules
from opt_partition._verify import Report, read_collectives, verify
from opt_partition._zero import ZeroLayouts, extend_over, shard_optimizer_state

__version__ = _version("opt-partition")

__all__ = [
    "ASK",
    "Collective",
    "Expected",
    "Explanation",
    "Finding",
    "Layout",
    "LeafLayout",
    "LeafReport",
    "MemoryPlan",
    "OptaxStatePartitionRules",
    "Parameter",
    "PlanRow",
    "Report",
    "Row",
    "Rules",
    "StateLeaf",
    "Unjudged",
    "ZeroLayouts",
    "derive_logical_axes",
    "errors",
    "explain",
    "extend_over",
    "init_sharded",
    "logical_to_mesh",
    "memory_plan",
    "normalise_param_axes",
    "read_collectives",
    "shard_optimizer_state",
    "verify",
]
