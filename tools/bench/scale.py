"""Steps compiled for hundreds of virtual devices, next to the same steps for eight.

    hatch run dev:python tools/bench/scale.py --devices 256 512

Nothing runs and nothing is allocated: the program of many devices is that of one of them. It should
have as many collectives as on eight devices, and arguments of the size that the plan says.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import opt_adafactor
import optax
from _common import Counts, Figure, Row, counted, counts, main, optax_step, timed
from jax.sharding import AxisType, Mesh, PartitionSpec
from opt_matrix import Matrices, muon, plan_matrices
from opt_partition import memory_plan

EIGHT = "8 devices"
OPTIMIZERS = ("AdamW with ZeRO-1", "Adafactor", "Muon")
FIGURES = {
    **{f"compile, {name}": Figure(EIGHT) for name in OPTIMIZERS},
    **{f"collectives, {name}": Figure(EIGHT, 1.0, "collectives") for name in OPTIMIZERS[:2]},
    # How matrices are shared out depends on how many there are for each device.
    "collectives, Muon": Figure("the plan", 1.0, "collectives"),
    **{f"bytes of arguments, {name}": Figure("the plan", 1.001, "B") for name in OPTIMIZERS},
}
MOST = 512
RULES = (("embed", "data"), ("mlp", "model"))


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step, compiled.

    Attributes:
      seconds: that it took.
      counts: of the program.
      arguments: bytes of its arguments on a device.
      planned: what the plan says of them.
      collectives: how many are planned; `None` without such a plan.
    """

    seconds: float
    counts: Counts
    arguments: int
    planned: int
    collectives: int | None


def compile_step(name: str, devices: int, leaves: int) -> Compiled:
    """Compiles one step for the first of the virtual devices."""
    shape = (devices // 4, 4)
    mesh = Mesh(
        np.array(jax.devices()[:devices]).reshape(shape),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
    )
    zero = "data" if name == OPTIMIZERS[0] else None
    # With ZeRO, parameters are replicated over `data`, and the state is divided over it.
    rules = (("embed", None), RULES[1]) if zero else RULES
    params = {f"w{i}": jax.ShapeDtypeStruct((1024, 4096), "float32") for i in range(leaves)}
    axes = dict.fromkeys(params, ("embed", "mlp"))
    matrices = Matrices.by_rank2()
    shared = plan_matrices(params, PartitionSpec("data", "model"), mesh, matrices)
    tx: Any = {
        OPTIMIZERS[0]: optax.adamw(1e-3),
        OPTIMIZERS[1]: opt_adafactor.adafactor(1e-3),
        OPTIMIZERS[2]: muon(1e-3, matrices=matrices, plan=shared),
    }[name]
    plan = memory_plan(tx, params, axes, rules, mesh, zero=zero)
    places = (plan.params.shardings, plan.state.shardings)
    jitted = jax.jit(
        optax_step(tx),
        in_shardings=(*places, plan.grads.shardings),
        out_shardings=places,
        donate_argnums=(0, 1),
    )
    lowered = jitted.lower(params, jax.eval_shape(tx.init, params), params)
    start = time.process_time()
    program: Any = lowered.compile()
    spent = time.process_time() - start
    planned = sum(part.bytes_per_device for part in (plan.params, plan.grads, plan.state))
    return Compiled(
        spent,
        counts(program),
        int(program.memory_analysis().argument_size_in_bytes),
        planned,
        sum(group.collectives for group in shared.groups) if name == "Muon" else None,
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--devices", type=int, nargs="+", help="256 and 512, or 64 with --quick")
    parser.add_argument("--leaves", type=int, default=8)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    for name in OPTIMIZERS:
        few = compile_step(name, 8, options.leaves)
        for devices in options.devices or ([64] if options.quick else [256, 512]):
            many = compile_step(name, devices, options.leaves)
            yield timed(f"compile, {name}", [many.seconds], [few.seconds], size=devices)
            expected = many.collectives or sum(few.counts.collectives.values())
            found = sum(many.counts.collectives.values())
            yield counted(f"collectives, {name}", found, expected, size=devices)
            figure = f"bytes of arguments, {name}"
            yield counted(figure, many.arguments, many.planned, size=devices)


if __name__ == "__main__":
    flags = f"--xla_force_host_platform_device_count={MOST}"
    environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    main(__doc__, FIGURES, measure, arguments, environment=environment, sizes="devices")
