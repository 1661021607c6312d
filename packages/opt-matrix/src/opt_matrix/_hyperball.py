"""Hyperball: matrices that keep their norm and turn by a fixed part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opt_matrix._matrices import (
    Dims,
    Matrices,
    all_matrices,
    labelled,
    path_str,
    require_rules,
)
from opt_matrix._transfer import place_like
from opt_matrix.errors import OptionError


def hyperball(
    tx: optax.GradientTransformation,
    matrices: Matrices,
    learning_rate: Any,
    *,
    rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Holds the Frobenius norm of each matrix, and of its updates, fixed.

    With `u` what `tx` proposes for a matrix `W`::

        W_next = |W| · V / |V|    where    V = W - learning_rate · |W| · u / |u|

    Every matrix of a stack has its own norm, as has each of those that `Dims.split` names. Norms
    are those of whole matrices, however they are sharded, in float32. Weight decay would change
    nothing.

    Args:
      tx: the direction of the steps, without a learning rate: `scale_by_muon` makes this MuonH,
        `optax.scale_by_adam` AdamH. Its updates are subtracted; those of a complete optimizer as
        `optax.adam(0.1)` have the other sign, and would climb.
      matrices: which leaves hold matrices.
      learning_rate: the norm of an update relative to that of its matrix; a number or a schedule.
      rest: the optimizer of all other leaves, with its own learning rate. Needed where there are
        any.

    Returns:
      A transformation that needs `params`. It keeps nothing of its own but the count of a schedule.
      A matrix of zeros has no norm to hold: its updates are NaN, and it should be initialised or
      be rest. One without a direction, as of an expert without tokens, stays as it is.

    Raises:
      OptionError: `matrices` is something else.
      UndecidedError: when it meets parameters: `matrices` does not decide a leaf, or leaves are
        rest and `rest` is not given.

    References:
      Wen et al., `Hyperball Optimization <https://arxiv.org/abs/2606.16899>`_, 2026

    Examples:
      >>> tx = hyperball(optax.identity(), Matrices.by_rank2(), 0.75)
      >>> params = {'w': jnp.array([[4.0, 0.0]])}
      >>> updates, _ = jax.jit(tx.update)({'w': jnp.array([[0.0, -7.0]])}, tx.init(params), params)
      >>> optax.apply_updates(params, updates)['w'].round(4).tolist()
      [[3.2, 2.4]]
    """
    require_rules(matrices)
    held = optax.chain(tx, scale_by_hyperball(matrices, learning_rate))

    def labels(params: Any) -> Any:  # an error about overrides finds `hyperball` by this function
        if rest is None:
            all_matrices("hyperball", matrices.resolve(params))
        return labelled(params, matrices, "hyperball", "rest")

    others: dict[Any, Any] = {} if rest is None else {"rest": rest}
    return optax.partition({"hyperball": held, **others}, labels)


def scale_by_hyperball(matrices: Matrices, learning_rate: Any) -> optax.GradientTransformation:
    """Turns matrices in the direction of updates; see `hyperball`."""
    scaled = optax.scale_by_schedule if callable(learning_rate) else optax.scale
    rate: Any = scaled(learning_rate)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise OptionError(
                "`hyperball` holds the norms of parameters: call `update` with `params`"
            )
        decided = matrices.resolve(updates, all_used=False)  # some of them may be masked
        dims = all_matrices("hyperball", decided)
        size, state = rate.update(jnp.ones([]), state)

        def turned(path: Any, u: jax.Array, w: jax.Array) -> jax.Array:
            return _turned(place_like(u, w), w, size, dims[path_str(path)]).astype(u.dtype)

        return jax.tree_util.tree_map_with_path(turned, updates, params), state

    return optax.GradientTransformation(rate.init, update)


def _turned(u: jax.Array, w: jax.Array, rate: jax.Array, dims: Dims) -> jax.Array:
    """The difference between a leaf and what it becomes."""
    u, w = u.astype(jnp.float32), w.astype(jnp.float32)
    total = _totals(dims, w.shape)
    # |V| by the inner product: all sums of a leaf are of what is there before the step, and are
    # exchanged at once.
    ww, wu, uu = total(w * w), total(w * u), total(u * u)
    part = jnp.where(uu > 0, rate * jnp.sqrt(ww / jnp.where(uu > 0, uu, 1.0)), 0.0)
    shrink = jnp.sqrt(ww / (ww - 2 * part * wu + part**2 * uu))
    return (shrink - 1) * w - shrink * part * u


def _totals(dims: Dims, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """Sums over each matrix of a leaf, as arrays that broadcast against the leaf."""
    if not dims.split:
        return lambda x: jnp.sum(x, dims.reduction + dims.output, keepdims=True)
    # Which of the matrices side by side a column is of, as a product: nothing is cut where shards
    # are not.
    members = np.repeat(np.eye(len(dims.split), dtype=np.float32), dims.split, axis=1)
    by_dim = np.stack([dims.along_output(row, shape) for row in members], axis=-1)

    def total(x: jax.Array) -> jax.Array:
        columns = jnp.sum(x, dims.reduction, keepdims=True)[..., None]
        each = jnp.sum(columns * by_dim, dims.output, keepdims=True)
        return jnp.sum(each * by_dim, -1)

    return total
