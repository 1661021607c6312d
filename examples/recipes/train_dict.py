"""Parameters in a plain dict on a mesh, with nothing but JAX and Optax around them.

    python -m pip install opt-checkpoint opt-partition
    python examples/recipes/train_dict.py

The loop is plain Optax. `opt_partition` plans and creates the state, sharded over the data axis too
(ZeRO-1), and `opt_checkpoint` resumes with a schedule and a clip that the first run did not have,
then on half of the devices.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_partition as part
import optax
from jax.sharding import AxisType, Mesh
from opt_checkpoint import Checkpointer, TrainingState

AXES = {"wi": ("embed", "mlp"), "wo": ("mlp", "embed")}
RULES = [("embed", None), ("mlp", "model")]
X = np.sin(np.arange(64 * 16, dtype=np.float32)).reshape(64, 16)


def make_mesh(share: int = 1) -> Mesh:
    """Returns a mesh of all devices, or of a share; a CPU is split into 8 virtual ones."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()[: max(jax.device_count() // share, 1)]
    width = 2 if len(devices) % 2 == 0 else 1
    shape, types = (len(devices) // width, width), (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=types, devices=devices)


def init_params() -> dict[str, jax.Array]:
    """Returns the parameters of an autoencoder."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "wi": 0.3 * jax.random.normal(keys[0], (16, 32)),
        "wo": 0.3 * jax.random.normal(keys[1], (32, 16)),
    }


def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean squared error of the reconstruction."""
    return jnp.mean((jnp.tanh(X @ params["wi"]) @ params["wo"] - X) ** 2)


def train(state: TrainingState, steps: int) -> tuple[TrainingState, float]:
    """Returns the state after `steps` updates, and the last loss."""

    def train_step(state: TrainingState) -> tuple[TrainingState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainingState(state.tx, params, opt_state, state.step + 1), loss

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step: Any = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    losses = []
    for _ in range(steps):
        state, loss = step(state)
        losses.append(float(loss))
    assert step._cache_size() == 1
    print(f"step {int(state.step)}: loss {losses[0]:.4f} to {losses[-1]:.4f}; compiled once")
    return state, losses[-1]


def create(tx: Any) -> TrainingState:
    """Returns the state before the first update."""
    params = init_params()
    return TrainingState(tx, params, tx.init(params), jnp.zeros((), jnp.int32))


def main() -> None:
    """Trains, saves, and resumes with another optimizer, and on fewer devices."""
    mesh = make_mesh()
    replicated = jax.NamedSharding(mesh, jax.P())
    shapes = jax.eval_shape(init_params)

    tx = optax.adamw(1e-2)
    plan = part.memory_plan(tx, shapes, AXES, RULES, mesh, zero="data")
    whole, each = plan.state.bytes, plan.state.bytes_per_device
    print(f"optimizer state: {whole:,} bytes, {each:,} on each of {mesh.size} devices")
    params = jax.jit(init_params, out_shardings=plan.params.shardings)()
    opt_state = part.init_sharded(tx, params, plan.state)
    step = jnp.zeros((), jnp.int32, device=replicated)
    state, before = train(TrainingState(tx, params, opt_state, step), 60)

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(60, state)
        checkpointer.wait()
        # The target is of shapes: nothing is allocated twice. The plan says where they go. Leaves
        # are matched by what they mean, so the moments keep their values in the longer chain.
        schedule = optax.cosine_decay_schedule(1e-2, 120)
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
        plan = part.memory_plan(tx, shapes, AXES, RULES, mesh, zero="data")
        target = jax.eval_shape(lambda: create(tx))
        state = checkpointer.restore_latest(target, placement=plan)
        state, after = train(state, 60)
        assert after < before
        assert jax.tree.map(lambda leaf: leaf.sharding, state.opt_state) == plan.state.shardings
        checkpointer.save(120, state)
        checkpointer.wait()

        mesh = make_mesh(share=2)  # half of the devices: a plan for them is all that changes
        plan = part.memory_plan(tx, shapes, AXES, RULES, mesh, zero="data")
        state = checkpointer.restore_latest(target, placement=plan)
    print(f"resumed on {mesh.size} of {jax.device_count()} devices")
    state, last = train(state, 10)
    assert last < before
    assert jax.tree.map(lambda leaf: leaf.sharding, state.opt_state) == plan.state.shardings


if __name__ == "__main__":
    main()
