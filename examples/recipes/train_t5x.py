"""A T5X training loop on the facade of `t5x.optimizers`.

    python -m pip install opt-checkpoint opt-partition
    python examples/recipes/train_t5x.py

The model, its `params_axes`, the train state and the calls are those of T5X; one import changes.
What T5X's partitioner does for the optimizer is a call of `opt_partition`, for any optimizer.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import opt_partition as part
import optax
from flax.linen import partitioning as flax_partitioning
from jax.sharding import AxisType, Mesh
from opt_checkpoint import Checkpointer
from opt_optax_bridge import t5x as optimizers  # was: from t5x import optimizers

RULES = [("vocab", "model"), ("embed", None), ("mlp", "model")]
TOKENS = np.arange(64) % 32


def make_mesh(share: int = 1) -> Mesh:
    """Returns a mesh of all devices, or of a share; a CPU is split into 8 virtual ones."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()[: max(jax.device_count() // share, 1)]
    width = 2 if len(devices) % 2 == 0 else 1
    shape, types = (len(devices) // width, width), (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=types, devices=devices)


class Model(nn.Module):
    """Predicts each token from the previous one."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""

        def param(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> jax.Array:
            init = nn.initializers.lecun_normal()
            value: jax.Array = flax_partitioning.param_with_axes(name, init, shape, axes=axes)
            return value

        embedding = param("embedding", (32, 16), ("vocab", "embed"))
        x = embedding[tokens]
        hidden = nn.tanh(x @ param("wi", (16, 64), ("embed", "mlp")))
        x += hidden @ param("wo", (64, 16), ("mlp", "embed"))
        return x @ embedding.T


@flax.struct.dataclass
class FlaxOptimTrainState:
    """T5X's train state: the optimizer holds parameters, state and step."""

    optimizer: optimizers.OptimizerType

    def apply_gradient(self, grads: Any, learning_rate: jax.Array) -> FlaxOptimTrainState:
        """Returns the state after one update."""
        optimizer = self.optimizer.apply_gradient(grads, learning_rate=learning_rate)
        return FlaxOptimTrainState(optimizer)


def train_step(state: FlaxOptimTrainState) -> tuple[FlaxOptimTrainState, jax.Array]:
    """Makes one update."""

    def loss_fn(params: Any) -> jax.Array:
        logits: Any = Model().apply({"params": params}, TOKENS)
        targets = (TOKENS * 5 + 1) % 32
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.optimizer.target)
    # T5X's trainer passes its own schedule; the one of the optimizer acts, as in T5X.
    rate = 1.0 / jnp.sqrt(jnp.maximum(state.optimizer.state.step, 100))
    return state.apply_gradient(grads, learning_rate=rate), loss


def main() -> None:
    """Trains, saves and resumes, on all devices and on half of them."""
    mesh = make_mesh()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, warmup_steps=5, decay_steps=200)
    optimizer_def = optimizers.adamw(schedule)

    def create() -> FlaxOptimTrainState:
        params = Model().init(jax.random.key(0), TOKENS)["params"]
        return FlaxOptimTrainState(optimizer_def.create(params))

    variables = jax.eval_shape(Model().init, jax.random.key(0), TOKENS)
    names = flax_partitioning.get_axis_names(variables["params_axes"])
    shapes = jax.eval_shape(create)
    axes = FlaxOptimTrainState(optimizer_def.derive_logical_axes(shapes.optimizer, names))
    layout = part.logical_to_mesh(axes, RULES, mesh, shapes)
    state = jax.jit(create, out_shardings=layout.shardings)()

    def compiled(layout: part.Layout) -> Any:
        return jax.jit(train_step, donate_argnums=0, out_shardings=(layout.shardings, None))

    step = compiled(layout)
    losses = []
    for _ in range(60):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {int(state.optimizer.state.step)} steps")
    print(f"state dict, as T5X wrote it: {sorted(state.optimizer.state_dict()['state'])}")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(60, state.optimizer)
        checkpointer.wait()
        restored = checkpointer.restore_latest(shapes.optimizer)
        state, loss = step(FlaxOptimTrainState(restored))
        assert loss < losses[0]
        assert step._cache_size() == 1  # restored arrays are sharded as before
        print(f"resumed, step {int(state.optimizer.state.step)}: loss {loss:.4f}; compiled once")

        half = make_mesh(share=2)  # other devices: a layout on them says where everything goes
        layout = part.logical_to_mesh(axes, RULES, half, shapes)
        where = layout.shardings.optimizer
        restored = checkpointer.restore_latest(shapes.optimizer, placement=where)
    step, state = compiled(layout), FlaxOptimTrainState(restored)
    for _ in range(3):
        state, loss = step(state)
    assert loss < losses[0]
    assert step._cache_size() == 1
    print(f"resumed on {half.size} devices: loss {loss:.4f}; compiled once")


if __name__ == "__main__":
    main()
