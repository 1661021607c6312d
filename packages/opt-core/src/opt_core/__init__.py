"""The optimizer contract of Flax and T5X, on today's JAX.

An `OptimizerDef` says how parameters are updated, an `OptimizerState` is what it remembers,
and an `Optimizer` is the two together with the parameters: one pytree that goes through
`jit`, `scan`, `vmap` and `eval_shape`, and in and out of checkpoints by path.

>>> import jax, jax.numpy as jnp
>>> class Descent(OptimizerDef):
...     def init_state(self, params):
...         return OptimizerState(jnp.int32(0), jax.tree.map(lambda _: (), params))
...     def apply_gradient(self, hyper_params, params, state, grads):
...         params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
...         return params, OptimizerState(state.step + 1, state.param_states)
>>> optimizer = Descent({}).create({'w': jnp.ones(2)})
>>> optimizer.apply_gradient({'w': jnp.ones(2)}).target['w'].tolist()
[0.5, 0.5]
"""

from importlib.metadata import version as _version

from opt_core import errors, protocols
from opt_core._description import (
    Bearing,
    LeafDescription,
    StateDescription,
    TransformationDescription,
    describe_state,
)
from opt_core._gradients import check_gradients
from opt_core._groups.describe import (
    ClipMetrics,
    GroupNorms,
    GroupRow,
    GroupTable,
    clip_metrics,
    describe,
    group_metrics,
)
from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.table import FROZEN, Group, GroupStates
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState, increment_step
from opt_core._plan.plan import Plan
from opt_core._state_dict import Mismatch, restore_state_dict, to_state_dict
from opt_core._surgery import freeze, regroup, reset, unfreeze

__version__ = _version("opt-core")

__all__ = [
    "FROZEN",
    "Bearing",
    "ClipMetrics",
    "Group",
    "GroupNorms",
    "GroupRow",
    "GroupStates",
    "GroupTable",
    "LeafDescription",
    "Mismatch",
    "MultiOptimizer",
    "Optimizer",
    "OptimizerDef",
    "OptimizerState",
    "Plan",
    "StateDescription",
    "TransformationDescription",
    "check_gradients",
    "clip_metrics",
    "describe",
    "describe_state",
    "errors",
    "freeze",
    "group_metrics",
    "increment_step",
    "protocols",
    "regroup",
    "reset",
    "restore_state_dict",
    "to_state_dict",
    "unfreeze",
]
