"""Checkpoints that survive a change of optimizer, of mesh, of library version, and a kill."""

from opt_optax_bridge.checkpoint import errors
from opt_optax_bridge.checkpoint._adafactor_rules import (
    ADAFACTOR_FROM_OPTAX,
    ADAFACTOR_MOMENTUM_FROM_OPTAX,
    OPTAX_FROM_ADAFACTOR,
    OPTAX_MOMENTUM_FROM_ADAFACTOR,
)
from opt_optax_bridge.checkpoint._checkpointer import Checkpointer
from opt_optax_bridge.checkpoint._flax_optim import flax_optim_equivalent
from opt_optax_bridge.checkpoint._legacy_read import read_legacy
from opt_optax_bridge.checkpoint._legacy_restore import restore_legacy
from opt_optax_bridge.checkpoint._match import plan_restore
from opt_optax_bridge.checkpoint._names import NamedState, named_state, restore_named
from opt_optax_bridge.checkpoint._optax_states import wrap_optax_state
from opt_optax_bridge.checkpoint._plan import Dropped, Plan, Row
from opt_optax_bridge.checkpoint._rules import Rename, Stack, Unstack
from opt_optax_bridge.checkpoint._saved_step import SavedStep, open_step
from opt_optax_bridge.checkpoint._schema import (
    LeafInfo,
    Schema,
    Source,
    Transformation,
    leaf_name,
    leaf_path,
)

__all__ = [
    "ADAFACTOR_FROM_OPTAX",
    "ADAFACTOR_MOMENTUM_FROM_OPTAX",
    "OPTAX_FROM_ADAFACTOR",
    "OPTAX_MOMENTUM_FROM_ADAFACTOR",
    "Checkpointer",
    "Dropped",
    "LeafInfo",
    "NamedState",
    "Plan",
    "Rename",
    "Row",
    "SavedStep",
    "Schema",
    "Source",
    "Stack",
    "Transformation",
    "Unstack",
    "errors",
    "flax_optim_equivalent",
    "leaf_name",
    "leaf_path",
    "named_state",
    "open_step",
    "plan_restore",
    "read_legacy",
    "restore_legacy",
    "restore_named",
    "wrap_optax_state",
]
