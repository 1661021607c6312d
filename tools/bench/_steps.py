"""Steps on a mesh of two axes, planned by opt-partition, as several benchmarks compile them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import opt_adafactor
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec
from opt_matrix import Matrices, muon, newton_schulz, plan_matrices
from opt_partition import memory_plan

OPTIMIZERS = ("AdamW with ZeRO-1", "Adafactor", "Muon")
RULES = (("embed", "data"), ("mlp", "model"))


@dataclasses.dataclass(frozen=True)
class Planned:
    """An optimizer, and the plan of its steps.

    Attributes:
      tx: the optimizer.
      params: shapes of the matrices.
      state: shapes of its state.
      plan: of memory and shardings.
      collectives: that the plan of the matrices names; `None` without such a plan.
    """

    tx: Any
    params: dict[str, Any]
    state: Any
    plan: Any
    collectives: int | None


def plan_step(
    name: str,
    devices: int,
    across: int,
    leaves: int,
    shape: tuple[int, int],
    *,
    among: Sequence[Any] | None = None,
) -> Planned:
    """Plans the steps of one of the `OPTIMIZERS`.

    Args:
      name: which one.
      devices: how many, the first of `among`.
      across: how many of them are on the axis `model`.
      leaves: matrices.
      shape: of each.
      among: devices; by default JAX's.
    """
    mesh = Mesh(
        np.array((among or jax.devices())[:devices]).reshape(-1, across),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
    zero = "data" if name == OPTIMIZERS[0] else None
    # With ZeRO, parameters are replicated over `data`, and the state is divided over it.
    rules = (("embed", None), RULES[1]) if zero else RULES
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, "float32") for i in range(leaves)}
    axes = dict.fromkeys(params, ("embed", "mlp"))
    matrices = Matrices.by_rank2()
    fn = newton_schulz(dtype=None)  # float32, so that the order of sums is all that may differ
    shared = plan_matrices(params, PartitionSpec("data", "model"), mesh, matrices, fn=fn)
    tx: Any = {
        OPTIMIZERS[0]: optax.adamw(1e-3),
        OPTIMIZERS[1]: opt_adafactor.adafactor(1e-3),
        OPTIMIZERS[2]: muon(1e-3, matrices=matrices, plan=shared),
    }[name]
    return Planned(
        tx,
        params,
        jax.eval_shape(tx.init, params),
        memory_plan(tx, params, axes, rules, mesh, zero=zero),
        sum(group.collectives for group in shared.groups) if name == "Muon" else None,
    )
