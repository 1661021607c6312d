"""The global norm of a tree, and gradient clipping by it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from opt_legacy_stax._dtypes import keep_dtypes


def l2_norm(tree: Any) -> Any:
    """Returns the global L2 norm of a tree: the root of the sum of squares of all leaves.

    Examples:
      >>> float(l2_norm({'a': jnp.array([3.0]), 'b': jnp.array([4.0])}))
      5.0
    """
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(tree)))


def clip_grads(grad_tree: Any, max_norm: Any, *, upstream_numerics: bool = False) -> Any:
    """Scales gradients down so that their global norm is at most `max_norm`.

    ```
    g <- g * min(1, max_norm / l2_norm(grad_tree))
    ```

    Args:
      grad_tree: pytree of arrays.
      max_norm: the maximum norm. NaN makes all gradients NaN.
      upstream_numerics: whether to compute exactly like JAX's module, where zeros clipped to 0
        become NaN, a single NaN makes all gradients NaN, and leaves of low precision are promoted
        to the dtype of the norm.

    Returns:
      The gradients, in their own dtypes. If the norm is NaN they are returned unchanged, so that a
      wrapper can still see which gradients are NaN.

    References:
      Pascanu, Mikolov and Bengio, `On the difficulty of training Recurrent Neural Networks`, 2013,
      https://arxiv.org/abs/1211.5063.

    Examples:
      >>> clip_grads([jnp.array([3.0, 4.0])], 1.0)[0].tolist()
      [0.6, 0.8]
      >>> clip_grads([jnp.zeros(2)], 0.0)[0].tolist()
      [0.0, 0.0]
    """
    norm = l2_norm(grad_tree)
    if upstream_numerics:
        return jax.tree.map(
            lambda g: jnp.where(norm < max_norm, g, g * (max_norm / norm)), grad_tree
        )

    stays = (norm <= max_norm) | jnp.isnan(norm)

    def clip(g: Any) -> Any:
        clipped = jnp.where(stays, g, g * (max_norm / norm))
        return keep_dtypes([g], [clipped])[0]

    return jax.tree.map(clip, grad_tree)
