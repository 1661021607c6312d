"""More programs than XLA's CPU client runs at once must not hang: run in a process of its own.

    hatch run dev:python tests-integration/test_many_programs.py 20000 200   # rounds, restores

What takes more than a minute prints where every thread is, and ends the program with 1.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_checkpoint import named_state, plan_restore
from opt_checkpoint._digest import Digests, digests, to_hex

SPECS = [P(None, "model"), P("data"), P("data", "model"), P()]
LEAVES, LIMIT = 40, 60
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def step(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Every leaf moves by the mean of all: collectives over all axes."""
    mean = sum(jnp.mean(leaf) for leaf in leaves.values()) / len(leaves)
    return {name: 0.99 * leaf + mean for name, leaf in leaves.items()}


def main(rounds: int, restores: int) -> None:
    """Makes restores, then steps and digests, whose sums are compared with those on the host."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, P("data", "model"))

    def optimizer(dtype: Any) -> Any:
        large = {f"w{i}": jnp.ones((768, 768), dtype, device=place) for i in range(100)}
        return jax.block_until_ready(opt.sgd(0.1).create(large))

    saved, target = named_state(optimizer("float32")), optimizer("bfloat16")
    plan = plan_restore(saved, target, rules=[(".*", "cast")])
    for _ in range(restores):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        jax.block_until_ready(plan.apply().target)

    values = np.random.default_rng(0).standard_normal((LEAVES, 32, 24), np.float32)
    places = [NamedSharding(mesh, SPECS[i % len(SPECS)]) for i in range(LEAVES)]
    leaves = {str(i): jax.device_put(values[i], at) for i, at in enumerate(places)}
    lies = {name: leaf.sharding for name, leaf in leaves.items()}
    compiled = jax.jit(step, donate_argnums=0, out_shardings=lies).lower(leaves).compile()
    for i in range(1, rounds + 1):
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        leaves = compiled(leaves)
        pending = Digests(list(leaves.values()))
        if i % 50 == 0:
            expected = digests([np.array(leaf) for leaf in leaves.values()])
            assert [to_hex(pair) for pair in pending.sums()] == expected
    print(f"{restores} restores, {rounds} rounds")


@pytest.mark.slow
def test_digests_and_restores_during_steps() -> None:
    # With NPROC, the CPU client has more threads than a user's has; see `conftest.py`.
    own = {name: value for name, value in os.environ.items() if name != "NPROC"}
    own["JAX_PLATFORMS"] = "cpu"
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    command = [sys.executable, __file__, "2000", "20"]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    for process in busy:
        process.kill()
        process.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "20 restores, 2000 rounds\n"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
