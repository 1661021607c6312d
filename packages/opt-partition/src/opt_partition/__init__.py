"""Sharding of any optimizer state, derived from the parameters' logical axes.

*Logical axes* name the dimensions of a parameter. *Rules* map the names to mesh axes. *Specs* are
`PartitionSpec`s of mesh axes, a *layout* says for every leaf of a tree where it lies on a mesh.
"""

from importlib.metadata import version as _version

from opt_partition import errors
from opt_partition._explain import Explanation, Row, derive_logical_axes, explain
from opt_partition._init_sharded import init_sharded
from opt_partition._layout import Layout, LeafLayout
from opt_partition._logical_to_mesh import logical_to_mesh
from opt_partition._memory_plan import memory_plan
from opt_partition._param_axes import normalise_param_axes
from opt_partition._plan import MemoryPlan
from opt_partition._rules import ASK, DEFAULT_RULES, Rules, StateLeaf
from opt_partition._t5x import OptaxStatePartitionRules
from opt_partition._verify import verify
from opt_partition._verify_leaves import Expected
from opt_partition._verify_report import Report
from opt_partition._zero import extend_over

__version__ = _version("opt-partition")

__all__ = [
    "ASK",
    "DEFAULT_RULES",
    "Expected",
    "Explanation",
    "Layout",
    "LeafLayout",
    "MemoryPlan",
    "OptaxStatePartitionRules",
    "Report",
    "Row",
    "Rules",
    "StateLeaf",
    "derive_logical_axes",
    "errors",
    "explain",
    "extend_over",
    "init_sharded",
    "logical_to_mesh",
    "memory_plan",
    "normalise_param_axes",
    "verify",
]
