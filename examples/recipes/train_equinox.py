"""An Equinox module: its arrays are trained, everything else is left alone.

    python -m pip install equinox opt-checkpoint opt-partition
    python examples/recipes/train_equinox.py

An Equinox module is a pytree with functions among its leaves. `eqx.filter` separates the arrays
from them; these are the parameters, and `eqx.combine` makes a module again.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_partition as part
import optax
from jax.sharding import AxisType, Mesh
from opt_checkpoint import Checkpointer, TrainingState

RULES = [("inputs", None), ("outputs", "model")]
X = np.sin(np.arange(64 * 8, dtype=np.float32)).reshape(64, 8)


def make_mesh(share: int = 1) -> Mesh:
    """Returns a mesh of all devices, or of a share; a CPU is split into 8 virtual ones."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()[: max(jax.device_count() // share, 1)]
    width = 2 if len(devices) % 2 == 0 else 1
    shape, types = (len(devices) // width, width), (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=types, devices=devices)


def make_model() -> eqx.nn.MLP:
    """Returns the model, an autoencoder."""
    return eqx.nn.MLP(8, 8, width_size=32, depth=2, key=jax.random.key(0))


def make_params() -> Any:
    """Returns the arrays of the model, with `None` for everything else."""
    return eqx.filter(make_model(), eqx.is_array)


def axes_of(params: Any) -> Any:
    """Returns names of dimensions: Equinox stores matrices as (outputs, inputs)."""
    return jax.tree.map(lambda leaf: ("outputs", "inputs")[: leaf.ndim], params)


def loss_fn(params: Any, static: Any) -> jax.Array:
    """Returns the mean squared error of the reconstruction."""
    model = eqx.combine(params, static)
    return jnp.mean((jax.vmap(model)(X) - X) ** 2)


def main() -> None:
    """Trains, saves and resumes, on all devices and on half of them."""
    mesh = make_mesh()
    tx = opt.as_transformation(opt.chain(opt.clip_by_global_norm(1.0), opt.adamw(1e-2)))

    shapes = jax.eval_shape(make_params)
    static = eqx.filter(make_model(), eqx.is_array, inverse=True)

    def plan_on(mesh: Mesh) -> part.MemoryPlan:
        return part.memory_plan(tx, shapes, axes_of(shapes), RULES, mesh, zero="data")

    plan = plan_on(mesh)
    params = jax.jit(make_params, out_shardings=plan.params.shardings)()
    opt_state = part.init_sharded(tx, params, plan.state)

    def train_step(params: Any, opt_state: Any, rate: float) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, static)
        updates, opt_state = tx.update(grads, opt_state, params, learning_rate=rate)
        return optax.apply_updates(params, updates), opt_state, loss

    def compiled(plan: part.MemoryPlan) -> Any:
        shardings = (plan.params.shardings, plan.state.shardings, None)
        return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=shardings)

    step = compiled(plan)
    losses = []
    for number in range(60):
        rate = 1e-2 * min(1.0, (number + 1) / 10)  # an argument, so it does not recompile
        params, opt_state, loss = step(params, opt_state, rate)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(60, TrainingState(tx, params, opt_state, step=60))
        checkpointer.wait()
        target = TrainingState(tx, shapes, jax.eval_shape(tx.init, shapes))  # nothing allocated yet
        restored = checkpointer.restore_latest(target)
        params, opt_state, loss = step(restored.params, restored.opt_state, 1e-2)
        assert loss < losses[0]
        assert step._cache_size() == 1  # restored arrays are sharded as before
        print(f"resumed from step {int(restored.step)}: loss {loss:.4f}; compiled once")

        plan = plan_on(make_mesh(share=2))  # other devices: their plan says where everything goes
        restored = checkpointer.restore_latest(target, placement=plan)
    step, params, opt_state = compiled(plan), restored.params, restored.opt_state
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, 1e-2)
    assert loss < losses[0]
    assert step._cache_size() == 1
    print(f"resumed on {plan.mesh.size} devices: loss {loss:.4f}; compiled once")
    model = eqx.combine(params, static)
    print(f"the model again: {type(model).__name__} with {len(model.layers)} layers")


if __name__ == "__main__":
    main()
