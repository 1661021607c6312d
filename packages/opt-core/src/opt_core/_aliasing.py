"""Donation needs every leaf to own its buffer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def unalias(tree: Any, *, apart_from: Any = ()) -> Any:
    """Copies every array of `tree` that occurs before, in `tree` itself or in `apart_from`.

    Some optimizers keep the initial parameters in their state. Donating parameters and state then
    donates one buffer twice, which XLA refuses.

    Args:
      tree: any pytree. Tracers and NumPy arrays are left as they are: XLA gives each output of a
        compiled function a buffer of its own.
      apart_from: a pytree whose arrays must not be shared either.

    Returns:
      `tree`, where no two `jax.Array` leaves are one object.

    Examples:
      >>> x = jnp.ones(3)
      >>> a, b = unalias((x, x))
      >>> a is x, b is x
      (True, False)
    """
    seen = {id(leaf) for leaf in jax.tree.leaves(apart_from)}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return leaf
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)
