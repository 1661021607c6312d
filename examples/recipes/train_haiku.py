"""A Haiku model: parameters by module and name, and groups of them by pattern.

    python -m pip install dm-haiku opt-checkpoint opt-partition
    python examples/recipes/train_haiku.py

Weight decay for matrices only, momentum SGD for biases, each with a learning rate at run time.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_partition as part
from jax.sharding import AxisType, Mesh
from opt_checkpoint import Checkpointer
from opt_core import MultiOptimizer, Optimizer, describe

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


def forward(x: jax.Array) -> jax.Array:
    """Returns a reconstruction of `x`."""
    output: jax.Array = hk.nets.MLP([32, 32, 8], activation=jnp.tanh)(x)
    return output


MODEL: Any = hk.without_apply_rng(hk.transform(forward))


def init_params() -> Any:
    """Returns the parameters, by module and name."""
    return MODEL.init(jax.random.key(0), X)


def axes_of(params: Any) -> Any:
    """Returns names of dimensions: Haiku stores matrices as (inputs, outputs)."""
    return jax.tree.map(lambda leaf: ("inputs", "outputs")[-leaf.ndim :], params)


def loss_fn(params: Any) -> jax.Array:
    """Returns the mean squared error of the reconstruction."""
    return jnp.mean((MODEL.apply(params, X) - X) ** 2)


def train_step(optimizer: Optimizer[Any], rate: float) -> tuple[Optimizer[Any], jax.Array]:
    """Makes one update, with a learning rate for each group."""
    loss, grads = jax.value_and_grad(loss_fn)(optimizer.params)
    overrides = {"biases": {"learning_rate": 10 * rate}}
    new = optimizer.apply_gradient(grads, learning_rate=rate, group_overrides=overrides)
    return new, loss


def compiled(optimizer: Optimizer[Any]) -> Any:
    """Returns the compiled step; its results are sharded like the optimizer."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, optimizer)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def main() -> None:
    """Trains, saves and resumes, on all devices and on half of them."""
    mesh = make_mesh()
    definition = MultiOptimizer.from_rules(
        [
            ("matrices", r".*/w", opt.adamw(1e-2, weight_decay=1e-3)),
            ("biases", r".*/b", opt.sgd(0.1, momentum=0.9)),
        ]
    )
    shapes = jax.eval_shape(init_params)

    def plan_on(mesh: Mesh) -> part.MemoryPlan:
        return part.memory_plan(definition, shapes, axes_of(shapes), RULES, mesh, zero="data")

    plan = plan_on(mesh)
    params = jax.jit(init_params, out_shardings=plan.params.shardings)()
    optimizer = Optimizer(definition, part.init_sharded(definition, params, plan.state), params)
    print(describe(optimizer))

    step = compiled(optimizer)
    losses = []
    for number in range(60):
        optimizer, loss = step(optimizer, 1e-2 * min(1.0, (number + 1) / 10))
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(60, optimizer)
        checkpointer.wait()
        target = jax.eval_shape(lambda: definition.create(init_params()))  # no arrays yet
        optimizer, loss = step(checkpointer.restore_latest(target), 1e-2)
        assert loss < losses[0]
        assert step._cache_size() == 1  # restored arrays are sharded as before
        print(f"resumed, step {int(optimizer.step)}: loss {loss:.4f}; compiled once")

        half = make_mesh(share=2)  # other devices: a plan for them says where everything goes
        optimizer = checkpointer.restore_latest(target, placement=plan_on(half))
    step = compiled(optimizer)
    for _ in range(3):
        optimizer, loss = step(optimizer, 1e-2)
    assert loss < losses[0]
    assert step._cache_size() == 1
    print(f"resumed on {half.size} devices, step {int(optimizer.step)}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
