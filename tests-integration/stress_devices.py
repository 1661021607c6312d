"""Checkpoints beside training steps, on 8 virtual devices and under load: none may hang.

    hatch run dev:python tests-integration/stress_devices.py --rounds 20000

In each round a step with collectives is started, and the digests of all that it returns, before it
ends; there are more leaves than programs may be in flight on a device of XLA's CPU client, which is
32. Digests are compared with those of the same bits on the host. Before these rounds, leaves are
restored with another dtype, whose check has a collective for each. What takes more than `--limit`
seconds prints where every thread is, and ends the program with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_checkpoint import named_state, plan_restore
from opt_checkpoint._digest import Digests, digests, to_hex

P = PartitionSpec
SPECS = [P(None, "model"), P("data"), P("data", "model"), P()]
LEAVES = 40
SHAPE = (32, 24)


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps that many cores busy; they end with this process, however it ends."""
    program = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    command = [sys.executable, "-c", program]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def make_leaves(mesh: Mesh) -> dict[str, jax.Array]:
    """Returns leaves of several shardings."""
    rng = np.random.default_rng(0)
    places = [NamedSharding(mesh, SPECS[i % len(SPECS)]) for i in range(LEAVES)]
    values = rng.standard_normal((LEAVES, *SHAPE), np.float32)
    return {str(i): jax.device_put(values[i], place) for i, place in enumerate(places)}


def step(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Every leaf moves by the mean of all: collectives over all axes."""
    mean = sum(jnp.mean(leaf) for leaf in leaves.values()) / len(leaves)
    return {name: 0.99 * leaf + mean for name, leaf in leaves.items()}


def restore(mesh: Mesh, times: int, limit: float) -> None:
    """Restores large parameters in half the precision."""
    place = NamedSharding(mesh, P("data", "model"))

    def optimizer(dtype: Any) -> Any:
        large = {f"w{i}": jnp.ones((768, 768), dtype, device=place) for i in range(100)}
        return jax.block_until_ready(opt.sgd(0.1).create(large))

    plan = plan_restore(
        named_state(optimizer("float32")), optimizer("bfloat16"), rules=[(".*", "cast")]
    )
    for _ in range(times):
        faulthandler.dump_traceback_later(limit, exit=True)
        jax.block_until_ready(plan.apply().target)
    print(f"restored {times} times", flush=True)


def run(mesh: Mesh, rounds: int, limit: float, *, compared_every: int) -> None:
    """Makes steps and digests.

    Raises:
      AssertionError: a digest is not that of the bits.
    """
    leaves = make_leaves(mesh)
    places: Any = jax.tree.map(lambda leaf: leaf.sharding, leaves)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=places).lower(leaves).compile()
    start = time.perf_counter()
    for i in range(1, rounds + 1):
        faulthandler.dump_traceback_later(limit, exit=True)
        leaves = compiled(leaves)
        pending = Digests(list(leaves.values()))
        if i % compared_every == 0 or i == rounds:
            expected = digests([np.array(leaf) for leaf in leaves.values()])
            assert [to_hex(pair) for pair in pending.sums()] == expected
        if i % max(1, rounds // 20) == 0 or i == rounds:
            seconds = time.perf_counter() - start
            print(f"round {i}/{rounds}, {seconds:.0f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--restores", type=int, default=20)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep cores busy")
    parser.add_argument("--limit", type=float, default=60, help="seconds that one may take")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with busy(options.busy):
        restore(mesh, options.restores, options.limit)
        run(mesh, options.rounds, options.limit, compared_every=50)


if __name__ == "__main__":
    main()
