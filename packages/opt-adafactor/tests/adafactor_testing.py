"""What several tests use."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from opt_adafactor import FactorDim
from opt_core import Optimizer

ROLES = {dim.name[0].lower(): dim for dim in FactorDim}


def rule(letters: str) -> tuple[FactorDim, ...]:
    """A factor rule from a letter per dimension."""
    return tuple(ROLES[letter] for letter in letters)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def apply_compiled(optimizer: Optimizer, grads: Any, **overrides: Any) -> Optimizer:
    """One step under `jit`: where ops are compared elsewhere, it compiles one program, not 40."""
    stepped: Optimizer = _apply_compiled(optimizer, grads, overrides)
    return stepped


@jax.jit
def _apply_compiled(optimizer: Any, grads: Any, overrides: Any) -> Any:
    return optimizer.apply_gradient(grads, **overrides)


def largest_difference(a: Any, b: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each array."""
    chex.assert_trees_all_equal_structs(a, b)

    def relative(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        return float(np.max(np.abs(x - y), initial=0.0) / (np.max(np.abs(y), initial=0.0) or 1.0))

    return max(map(relative, jax.tree.leaves(a), jax.tree.leaves(b)), default=0.0)
