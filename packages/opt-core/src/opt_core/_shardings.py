"""Where arrays are, and moving them there."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf has no value at all."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def placed(leaf: Any, sharding: Sharding | None) -> Any:
    """Returns a leaf with the right placement: itself if it has it."""
    if sharding is None or not hasattr(leaf, "dtype"):
        return leaf
    if is_abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf if getattr(leaf, "sharding", None) == sharding else jax.device_put(leaf, sharding)


def committed_sharding(leaf: Any) -> Sharding | None:
    """Returns where a leaf is committed to, if anywhere; where an abstract leaf is wanted."""
    if is_abstract(leaf):
        found: Sharding | None = leaf.sharding
        return found
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
