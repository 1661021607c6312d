"""A short training run on 8 devices, the same bits every time; prints the hash of what it ends in.

A residual network with clipping, AdamW in a schedule and accumulation over two mini-steps, over
a mesh of 4 x 2, its state sharded over the data axis besides.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_accumulate
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper
from opt_partition import Layout, extend_over, logical_to_mesh

STEPS = 6
RULES = [("mlp", "model"), ("embed", None)]
AXES = {
    "in": PartitionSpec("embed", "mlp"),
    "out": PartitionSpec("mlp", "embed"),
    "scale": PartitionSpec("embed"),
}
Step = Callable[[Any, Any], Any]


def make_params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"in": (16, 32), "out": (32, 16), "scale": (16,)}
    return {
        name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()
    }


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu((x * params["scale"]) @ params["in"]) @ params["out"] + x
    return jnp.mean(jnp.square(hidden - jnp.sin(x)))


@functools.cache
def start() -> tuple[Optimizer, Any]:
    """The optimizer on the host, and where it lies on the mesh."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, STEPS)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    definition = OptaxWrapper(opt_accumulate.MultiSteps(tx, 2))
    optimizer = definition.create(make_params())
    axes = definition.derive_logical_axes(optimizer, AXES)
    specs = jax.tree.map(lambda _, spec: spec or PartitionSpec(), optimizer, axes)
    layout = logical_to_mesh(specs, RULES, mesh, optimizer)
    zero = extend_over(Layout(mesh, layout.leaves.state), optimizer.state, mesh, "data")
    shardings = layout.shardings.replace(state=zero.shardings)
    return jax.tree.map(np.array, optimizer), shardings


def compiled_step(*, donate: bool) -> Step:
    """A training step that keeps the shardings."""

    def step(optimizer: Optimizer, x: jax.Array) -> Optimizer:
        return optimizer.apply_gradient(jax.grad(loss)(optimizer.target, x))

    return jax.jit(step, out_shardings=start()[1], donate_argnums=(0,) if donate else ())


def run(step: Step) -> str:
    """Trains; returns the hash of the bits of every leaf."""
    host, shardings = start()
    optimizer = jax.device_put(host, shardings)
    spread = NamedSharding(shardings.target["in"].mesh, PartitionSpec("data"))
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        x = rng.standard_normal((8, 16)).astype(np.float32)
        optimizer = step(optimizer, jax.device_put(x, spread))
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(optimizer):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(run(compiled_step(donate=True)))
