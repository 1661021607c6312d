"""NorMuon: Muon with a second moment for each output, as whole matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from opt_matrix._distribute import Distributed, PlannedTransformation, distribute
from opt_matrix._matrices import Matrices, all_matrices, leaves_by_path
from opt_matrix._muon import averaged
from opt_matrix._newton_schulz import newton_schulz
from opt_matrix._plan import MatrixPlan


class NorMuonState(NamedTuple):
    """The state of `scale_by_normuon`.

    Attributes:
      mu: the momentum, like the updates.
      nu: of each group of the plan, the mean square of each column: `[matrices, columns]`, float32.
    """

    mu: Any
    nu: tuple[Any, ...]


def scale_by_normuon(
    params: Any,
    shardings: Any,
    mesh: Any,
    *,
    matrices: Matrices | None = None,
    momentum: float = 0.95,
    beta2: float = 0.95,
    eps: float = 1e-8,
    nesterov: bool = True,
    orthogonalize: Callable[[jax.Array], jax.Array] | None = None,
    **options: Any,
) -> PlannedTransformation:
    """Rescales updates as NorMuon does: every output of a matrix moves about as much.

    The root mean square of each update is 0.2, as of AdamW's. The momentum lies as the parameters;
    the second moments lie with the device that computes with the matrix.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s, all of which hold matrices.
      shardings: where each leaf lies; see `plan_matrices`.
      mesh: of the shardings.
      matrices: which dimensions make a matrix, those of two-dimensional leaves by default.
      momentum: decay of the average of gradients.
      beta2: decay of the mean squares.
      eps: added to their roots.
      nesterov: whether to look a step ahead.
      orthogonalize: `newton_schulz()` by default.
      **options: of `distribute`: `max_group_bytes`, `world_axes`.

    Returns:
      A transformation with the `plan`, and `restack`, which brings its state to another one.

    References:
      Li et al., `NorMuon <https://arxiv.org/abs/2510.05491>`_, 2025

    Examples:
      >>> params = {'w': jnp.ones((4, 8))}
      >>> tx = scale_by_normuon(params, None, jax.make_mesh((1,), ('x',)))
      >>> updates, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params))
      >>> jnp.sqrt(jnp.mean(updates['w'] ** 2)).round(2).item(), state.nu[0].shape
      (0.2, (1, 8))
    """
    compute = newton_schulz() if orthogonalize is None else orthogonalize

    def normalized(x: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = compute(x).astype(jnp.float32)
        nu = beta2 * nu + (1 - beta2) * jnp.mean(y * y, axis=-2)
        y = y / (jnp.sqrt(nu)[:, None] + eps)
        norm = jnp.sqrt(jnp.sum(y * y, axis=(-2, -1), keepdims=True))
        # A matrix of zeros, as padding is, has no norm and stays zero.
        return y * (0.2 * (y.shape[-2] * y.shape[-1]) ** 0.5 / jnp.maximum(norm, 1e-30)), nu

    functools.update_wrapper(normalized, compute, ("dtype", "flops"), ())  # where it has those

    def init_group(stack: Any, numbers: jax.Array) -> jax.Array:
        return jnp.zeros((stack.shape[0], stack.shape[2]), jnp.float32)

    shared: Distributed = distribute(
        normalized, params, shardings, mesh, matrices=matrices, init=init_group, **options
    )

    def init(params: Any) -> Any:
        all_matrices("scale_by_normuon", shared.plan.dims_of(leaves_by_path(params)))
        return NorMuonState(optax.tree.zeros_like(params), shared.init())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu = averaged(updates, state.mu, momentum)
        ahead = averaged(updates, mu, momentum) if nesterov else mu
        new, nu = shared.apply(ahead, state.nu)
        return new, NorMuonState(mu, nu)

    def restack(state: NorMuonState, before: MatrixPlan) -> NorMuonState:
        return NorMuonState(state.mu, shared.restack(state.nu, before))

    return PlannedTransformation(init, update, shared.plan, restack)
