"""Arrays in the memory of the host: moved to be computed with, and back."""

from __future__ import annotations

from typing import Any

import jax


def on_device(leaf: Any) -> Any:
    """Returns an array in the memory of its devices; one that is there already as it is."""
    return jax.device_put(leaf, jax.memory.Space.Device) if _is_on_host(leaf) else leaf


def put_beside(leaf: Any, other: Any) -> Any:
    """Returns an array of device memory where `other` lies: on the host, if that does."""
    return jax.device_put(leaf, jax.memory.Space.Host) if _is_on_host(other) else leaf


def _is_on_host(leaf: Any) -> bool:
    # Explicit in types: operations on arrays of two memories are errors.
    if not isinstance(leaf, jax.Array):
        return False
    return getattr(jax.typeof(leaf), "memory_space", None) == jax.memory.Space.Host
