"""Checkpoints that survive a change of optimizer, of mesh, of library version, and a kill.

A step on disk names each leaf by what it means, and a restore is a plan that is made before a byte
is read. Importing this is cheap: Orbax and readers of legacy files are imported on first use.

>>> import jax.numpy as jnp, opt_optax_bridge as opt
>>> saved = named_state(opt.adam(1e-3).create({'w': jnp.ones(2)}))
>>> clipped = opt.chain(opt.clip(1.0), opt.adam(1e-3)).create({'w': jnp.zeros(2)})
>>> plan = plan_restore(saved, clipped)
>>> plan.is_ok, plan.notes
(True, ('`clip` is new',))
>>> plan.apply().target['w'].tolist()
[1.0, 1.0]
"""

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from opt_core.extend import (
    LeafInfo,
    Map,
    NamedState,
    Pad,
    Plan,
    Rename,
    Row,
    Rule,
    Schema,
    Source,
    Stack,
    Unstack,
)

from opt_checkpoint import errors
from opt_checkpoint._targets import TrainingState, named_state, plan_restore

__version__ = _version("opt-checkpoint")

if TYPE_CHECKING:
    from opt_checkpoint._checkpointer import Checkpointer
    from opt_checkpoint._foreign import open_foreign
    from opt_checkpoint._handler import OptimizerHandler, OptimizerRestore, OptimizerSave
    from opt_checkpoint._read_legacy import read_legacy
    from opt_checkpoint._restore_legacy import restore_legacy
    from opt_checkpoint._step import SavedStep, open_step

__all__ = [
    "Checkpointer",
    "LeafInfo",
    "Map",
    "NamedState",
    "OptimizerHandler",
    "OptimizerRestore",
    "OptimizerSave",
    "Pad",
    "Plan",
    "Rename",
    "Row",
    "Rule",
    "SavedStep",
    "Schema",
    "Source",
    "Stack",
    "TrainingState",
    "Unstack",
    "errors",
    "named_state",
    "open_foreign",
    "open_step",
    "plan_restore",
    "read_legacy",
    "restore_legacy",
]

_LATER = {
    "_checkpointer": ["Checkpointer"],
    "_foreign": ["open_foreign"],
    "_handler": ["OptimizerHandler", "OptimizerRestore", "OptimizerSave"],
    "_step": ["SavedStep", "open_step"],
    "_read_legacy": ["read_legacy"],
    "_restore_legacy": ["restore_legacy"],
}


def __getattr__(name: str) -> Any:
    """Imports what takes long to import on first use."""
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
