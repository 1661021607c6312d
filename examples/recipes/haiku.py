"""A Haiku model: parameters by module and name, and groups of them by pattern.

    python -m pip install dm-haiku opt-checkpoint opt-partition
    python examples/recipes/haiku.py

Weight decay for matrices only, momentum SGD for biases, each with a learning rate at run time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.path[0] == str(Path(__file__).parent):
    del sys.path[0]  # this file has the library's name

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


def make_mesh() -> Mesh:
    """Returns a mesh of all devices; a CPU is split into 8 virtual ones."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    width = 2 if jax.device_count() % 2 == 0 else 1
    shape = (jax.device_count() // width, width)
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


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
    rates = {"matrices": rate, "biases": 10 * rate}
    return optimizer.apply_gradient(grads, learning_rate=rates), loss


def main() -> None:
    """Trains, saves and resumes."""
    mesh = make_mesh()
    definition = MultiOptimizer.from_rules(
        [
            ("matrices", r".*/w", opt.adamw(1e-2, weight_decay=1e-3)),
            ("biases", r".*/b", opt.sgd(0.1, momentum=0.9)),
        ]
    )
    shapes = jax.eval_shape(init_params)
    plan = part.memory_plan(definition, shapes, axes_of(shapes), RULES, mesh, zero="data")
    params = jax.jit(init_params, out_shardings=plan.params.shardings)()
    optimizer = Optimizer(definition, part.init_sharded(definition, params, plan.state), params)
    print(describe(optimizer))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, optimizer)
    step: Any = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    losses = []
    for number in range(60):
        optimizer, loss = step(optimizer, 1e-2 * min(1.0, (number + 1) / 10))
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(60, optimizer)
        checkpointer.wait()
        target = Optimizer(definition, plan.state.shapes, plan.params.shapes)  # no arrays yet
        restored = checkpointer.restore_latest(target)
    optimizer, loss = step(restored, 1e-2)
    assert loss < losses[0]
    assert step._cache_size() == 1  # restored arrays are sharded as before
    print(f"resumed, step {int(optimizer.step)}: loss {loss:.4f}; compiled once")


if __name__ == "__main__":
    main()
