"""Checkpoints that survive a change of optimizer, of mesh, of library version, and a kill."""

from opt_optax_bridge.checkpoint import errors

__all__ = ["errors"]
