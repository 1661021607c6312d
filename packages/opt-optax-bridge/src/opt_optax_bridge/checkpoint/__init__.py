"""Checkpoints that survive a change of optimizer, of mesh, of library version, and a kill."""

from opt_optax_bridge.checkpoint import errors
from opt_optax_bridge.checkpoint._names import NamedState, named_state
from opt_optax_bridge.checkpoint._schema import (
    LeafInfo,
    Schema,
    Source,
    Transformation,
    leaf_name,
    leaf_path,
)

__all__ = [
    "LeafInfo",
    "NamedState",
    "Schema",
    "Source",
    "Transformation",
    "errors",
    "leaf_name",
    "leaf_path",
    "named_state",
]
