"""One of the processes that `processes.py` compares: it trains on its share of the devices.

    python tools/bench/_member.py ADDRESS NUMBER OF DEVICES SIDE FOLDER

The first process writes what it found to `FOLDER/found.json` and the parameters to `params.npz`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import counts, optax_step
from _steps import OPTIMIZERS, Planned, plan_step
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

LEAVES, STEPS = 8, 10


def held_bytes(arrays: Iterable[jax.Array]) -> int:
    """Returns the bytes of what this process holds of the arrays."""
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)


def place(shape: tuple[int, ...], seed: int, sharding: Any) -> jax.Array:
    """Returns an array of random numbers, the same with every number of processes."""
    value = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / shape[0] ** 0.5
    return jax.make_array_from_callback(shape, sharding, value.__getitem__)


def train(planned: Planned) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compiles the step of a few layers and makes it; returns what was found, and the parameters.

    Each layer multiplies by a matrix and by its transpose.
    """
    plan, (first, *_) = planned.plan, planned.params.values()
    batch = place((64, first.shape[0]), 0, NamedSharding(plan.mesh, PartitionSpec("data")))
    params = {
        name: place(leaf.shape, seed, plan.params.shardings[name])
        for seed, (name, leaf) in enumerate(planned.params.items(), start=1)
    }
    state = jax.jit(planned.tx.init, out_shardings=plan.state.shardings)(params)

    def loss(params: Any, x: Any) -> Any:
        for w in params.values():
            x = x + jnp.tanh(x @ w) @ w.T
        return jnp.mean(x**2)

    def step(params: Any, state: Any, batch: Any) -> Any:
        return optax_step(planned.tx)(params, state, jax.grad(loss)(params, batch))

    places = (plan.params.shardings, plan.state.shardings)
    jitted = jax.jit(
        step, in_shardings=(*places, batch.sharding), out_shardings=places, donate_argnums=(0, 1)
    )
    lowered = jitted.lower(params, state, batch)
    start = time.process_time()
    compiled: Any = lowered.compile()
    compiling = time.process_time() - start
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        params, state = jax.block_until_ready(compiled(params, state, batch))
        times.append(time.perf_counter() - start)
    found = {
        "compile": compiling,
        "a step": statistics.median(times),
        "collectives": sum(counts(compiled).collectives.values()),
        "bytes held": held_bytes(jax.tree.leaves((params, state))),
        "planned": (plan.params.bytes_per_device + plan.state.bytes_per_device)
        * jax.local_device_count(),
    }
    return found, multihost_utils.process_allgather(params, tiled=True)


def main() -> None:
    """Trains with every optimizer, and meets the other processes at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("address")
    parser.add_argument("number", type=int)
    parser.add_argument("of", type=int)
    parser.add_argument("devices", type=int)
    parser.add_argument("side", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices // options.of)
    if options.of > 1:
        jax.distributed.initialize(options.address, options.of, options.number)
    shape = (options.side, 4 * options.side)
    found: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for name in OPTIMIZERS:
        found[name], params = train(plan_step(name, options.devices, 2, LEAVES, shape))
        arrays |= {f"{name}/{path}": value for path, value in params.items()}
    if options.number == 0:
        np.savez(options.folder / "params.npz", **arrays)
        (options.folder / "found.json").write_text(json.dumps(found))
    if options.of > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
