"""SOAP: Adam in the eigenbasis of Shampoo's averages, as whole matrices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opt_matrix._distribute import Distributed, PlannedTransformation, distribute
from opt_matrix._matrices import Matrices, all_matrices, leaves_by_path

State = dict[str, jax.Array]

_SHIFT = 1e-3  # of the largest eigenvalue: far above what float32 rounds


@dataclasses.dataclass(frozen=True)
class _Soap:
    """The function of stacks, with its state.

    One in `refresh_every` bases is refreshed at every step, by the numbers of the matrices. These
    do not depend on the mesh, so neither do results.
    """

    b1: float
    b2: float
    average: float
    eps: float
    refresh_every: int

    @property
    def dtype(self) -> Any:
        return np.dtype(np.float32)  # eigenbases of bfloat16 averages would be noise

    def flops(self, fan_in: int, fan_out: int) -> float:
        products = 2.0 * fan_in * fan_out * (fan_in + fan_out)
        return 4 * products + 6.0 * (fan_in**3 + fan_out**3) / self.refresh_every

    def init(self, stack: Any, numbers: jax.Array) -> State:
        count, rows, columns = stack.shape
        left, right = (jnp.tile(jnp.eye(side), (count, 1, 1)) for side in (rows, columns))
        return {
            "number": numbers,
            "step": jnp.zeros(count, jnp.int32),
            "mu": jnp.zeros(stack.shape, jnp.float32),
            "nu": jnp.zeros(stack.shape, jnp.float32),
            "left": jnp.zeros_like(left),
            "right": jnp.zeros_like(right),
            "left_basis": left,
            "right_basis": right,
        }

    def __call__(self, x: jax.Array, state: State) -> tuple[jax.Array, State]:
        step = state["step"] + 1
        mu = self.b1 * state["mu"] + (1 - self.b1) * x
        q, p = state["left_basis"], state["right_basis"]
        turned, turned_mu = (_turned(m, q, p) for m in (x, mu))
        nu = self.b2 * state["nu"] + (1 - self.b2) * turned**2
        time = step.astype(jnp.float32)[:, None, None]
        direction = turned_mu / (1 - self.b1**time)
        direction /= jnp.sqrt(nu / (1 - self.b2**time)) + self.eps
        xt = jnp.swapaxes(x, 1, 2)
        state = {
            **state,
            "step": step,
            "mu": mu,
            "nu": nu,
            "left": self.average * state["left"] + (1 - self.average) * x @ xt,
            "right": self.average * state["right"] + (1 - self.average) * xt @ x,
        }
        return q @ direction @ jnp.swapaxes(p, 1, 2), self._refreshed(state)

    def _refreshed(self, state: State) -> State:
        """The state with new bases for those matrices whose turn it is, one after the other."""
        turn = (state["step"] + state["number"]) % self.refresh_every == 0
        due = turn & (state["number"] >= 0)  # padding has no turn
        order = jnp.argsort(~due)

        def refresh(place: jax.Array, state: State) -> State:
            index = order[place]
            own = {name: leaf[index] for name, leaf in state.items()}
            left, rows = _next_basis(own["left"], own["left_basis"])
            right, columns = _next_basis(own["right"], own["right_basis"])
            return {
                **state,
                "left_basis": state["left_basis"].at[index].set(left),
                "right_basis": state["right_basis"].at[index].set(right),
                # The second moments belong to directions, which may have changed places.
                "nu": state["nu"].at[index].set(own["nu"][rows][:, columns]),
            }

        refreshed: State = lax.fori_loop(0, jnp.sum(due), refresh, state)
        return refreshed


def scale_by_soap(
    params: Any,
    shardings: Any,
    mesh: Any,
    *,
    matrices: Matrices | None = None,
    b1: float = 0.95,
    b2: float = 0.95,
    average: float = 0.95,
    eps: float = 1e-8,
    refresh_every: int = 10,
    **options: Any,
) -> PlannedTransformation:
    """Rescales updates as SOAP does: Adam in bases that follow the gradients' covariances.

    Gradients travel to the device that computes with their matrix, and updates back; all state
    stays there. Bases start as the identity and are refreshed by one step of power iteration
    and a QR decomposition, for one in `refresh_every` matrices at each step.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s, all of which hold matrices.
      shardings: where each leaf lies; see `plan_matrices`.
      mesh: of the shardings.
      matrices: which dimensions make a matrix, those of two-dimensional leaves by default.
      b1: decay of the first moment.
      b2: decay of the second moment, in the bases.
      average: decay of the covariances.
      eps: added to the root of the second moment.
      refresh_every: in so many steps each matrix has its turn once.
      **options: of `distribute`: `max_group_bytes`, `world_axes`.

    Returns:
      A transformation whose state has, for each group of its `plan`, a dict of stacks; `restack`
      brings them to another plan.

    References:
      Vyas et al., `SOAP <https://arxiv.org/abs/2409.11321>`_, 2024

    Examples:
      >>> params = {'w': jnp.ones((4, 8))}
      >>> tx = scale_by_soap(params, None, jax.make_mesh((1,), ('x',)))
      >>> updates, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params))
      >>> updates['w'].shape, state[0]['left'].shape
      ((4, 8), (1, 4, 4))
    """
    fn = _Soap(b1, b2, average, eps, refresh_every)
    shared: Distributed = distribute(
        fn, params, shardings, mesh, matrices=matrices, init=fn.init, **options
    )

    def init(params: Any) -> tuple[Any, ...]:
        all_matrices("scale_by_soap", shared.plan.dims_of(leaves_by_path(params)))
        return shared.init()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, tuple[Any, ...]]:
        return shared.apply(updates, state)

    return PlannedTransformation(init, update, shared.plan, shared.restack)


def _turned(x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.swapaxes(left, -1, -2) @ x @ right


def _next_basis(covariance: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A basis nearer to the eigenvectors, by falling eigenvalue, and where each column was."""
    # A covariance of few gradients has a null space, of which a decomposition would return rounding
    # errors, other ones on every mesh. A shift has those directions continue the basis that was.
    values = jnp.sum(basis * (covariance @ basis), axis=0)
    shift = _SHIFT * jnp.max(values)
    order = jnp.argsort(-jnp.where(values > shift, values, 0))
    turned = basis[:, order]
    basis, _ = jnp.linalg.qr(covariance @ turned + shift * turned)
    return basis, order
