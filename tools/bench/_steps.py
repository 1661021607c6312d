"""Steps on a mesh of two axes, planned by opt-partition, as several benchmarks compile them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import optax.contrib
from _common import optax_step
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_matrix import Matrices, muon, newton_schulz, plan_matrices
from opt_partition import Expected, memory_plan

contrib: Any = optax.contrib
ZERO, MUON, OPTAX_MUON = "AdamW with ZeRO-1", "Muon", "optax.contrib.muon"
OPTIMIZERS = (ZERO, "Adafactor", MUON)


@dataclasses.dataclass(frozen=True)
class Planned:
    """An optimizer, shapes of its parameters and state, and the plan of its steps.

    `collectives` are those that the plan of the matrices names; `None` without such a plan.
    """

    tx: Any
    params: dict[str, Any]
    state: Any
    plan: Any
    collectives: int | None = None

    @property
    def expected(self) -> Expected:
        """The layout of parameters and state, before and after a step."""
        return Expected(*((self.plan.params, self.plan.state),) * 2)

    def lower(self, step: Callable[..., Any] | None = None, data: Any = None) -> Any:
        """Lowers a donated step of parameters, state and gradients.

        Args:
          step: by default Optax's.
          data: what it takes instead of gradients, divided over the axis `data`.
        """
        places = (self.plan.params.shardings, self.plan.state.shardings)
        sharding = self.plan.grads.shardings
        if data is not None:
            sharding = NamedSharding(self.plan.mesh, PartitionSpec("data"))
        made = step or optax_step(self.tx)
        return jax.jit(
            lambda *args: made(*args),  # traced anew each time
            in_shardings=(*places, sharding),
            out_shardings=places,
            donate_argnums=(0, 1),
        ).lower(self.params, self.state, self.params if data is None else data)

    def training_step(self, params: Any, state: Any, batch: Any) -> Any:
        """A step of layers that multiply by a matrix and by its transpose."""

        def loss(params: Any) -> Any:
            x = batch
            for w in params.values():
                x = x + jnp.tanh(x @ w) @ w.T
            return jnp.mean(x**2)

        return optax_step(self.tx)(params, state, jax.grad(loss)(params))


def plan_step(
    name: str,
    devices: int,
    across: int,
    leaves: int,
    shape: tuple[int, int],
    among: Sequence[Any] | None = None,
) -> Planned:
    """Plans the steps of one of the `OPTIMIZERS`.

    Args:
      name: which one, or Muon of Optax.
      devices: how many, the first of `among`.
      across: how many of them are on the axis `model`.
      leaves: matrices.
      shape: of each.
      among: devices; by default JAX's.
    """
    grid = np.array((among or jax.devices())[:devices]).reshape(-1, across)
    mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, "float32") for i in range(leaves)}
    collectives, zero = None, None
    tx: Any = optax.adamw(1e-3)
    if name == ZERO:
        zero = "data"
    elif name == MUON:
        matrices, spec = Matrices.by_rank2(), PartitionSpec("data", "model")
        # In float32, so that the order of sums is all that may differ.
        fn = newton_schulz(dtype=None)
        shared = plan_matrices(params, spec, mesh, matrices, fn=fn)
        tx = muon(1e-3, matrices=matrices, plan=shared)
        collectives = sum(group.collectives for group in shared.groups)
    elif name == OPTAX_MUON:
        tx = contrib.muon(1e-3)
    else:
        tx = opt_adafactor.adafactor(1e-3)
    # With ZeRO, parameters are replicated over `data`, and the state is divided over it.
    rules = (("embed", None if zero else "data"), ("mlp", "model"))
    plan = memory_plan(tx, params, dict.fromkeys(params, ("embed", "mlp")), rules, mesh, zero=zero)
    return Planned(tx, params, jax.eval_shape(tx.init, params), plan, collectives)
