"""A Linen model in Flax's `TrainState`, sharded by the names of its dimensions.

    python -m pip install opt-checkpoint opt-partition
    python examples/recipes/train_linen.py

`TrainState.create` and `apply_gradients` stay. `tx` is a definition with a group for the embedding
(Adafactor) and one for the rest (AdamW), as an Optax transformation.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_partition as part
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from opt_checkpoint import Checkpointer
from opt_core import MultiOptimizer

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
        init, names = nn.initializers.lecun_normal(), nn.with_logical_partitioning
        embed = nn.Embed(32, 16, embedding_init=names(init, ("vocab", "embed")))
        x = embed(tokens)
        hidden = nn.tanh(nn.Dense(64, kernel_init=names(init, ("embed", "mlp")), name="wi")(x))
        x += nn.Dense(16, kernel_init=names(init, ("mlp", "embed")), name="wo")(hidden)
        return embed.attend(x)


def init_params() -> Any:
    """Returns the parameters in Flax boxes, which name their dimensions."""
    return Model().init(jax.random.key(0), TOKENS)["params"]


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """Makes one update."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens)
        targets = (tokens * 5 + 1) % 32
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, loss


def compiled(state: TrainState) -> Any:
    """Returns the compiled step; its results are sharded like the state."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def main() -> None:
    """Trains, saves and resumes, on all devices and on half of them."""
    mesh = make_mesh()
    groups = MultiOptimizer.from_rules(
        [("embedding", r"Embed_0/.*", opt.adafactor(1e-2, min_dim_size_to_factor=16))],
        rest=opt.adamw(1e-2),
    )
    tx = opt.as_transformation(groups)

    boxed = jax.eval_shape(init_params)

    def plan_on(mesh: Mesh) -> part.MemoryPlan:
        return part.memory_plan(tx, nn.unbox(boxed), boxed, RULES, mesh, zero="data")

    plan = plan_on(mesh)

    def create() -> Any:  # a `TrainState`
        params = nn.unbox(init_params())
        state = TrainState.create(apply_fn=Model().apply, params=params, tx=tx)
        # Flax's step is a Python int, of a weak type; a checkpoint restores a strong one.
        return state.replace(step=jnp.zeros((), jnp.int32))

    # Everything is created where it stays: the whole state, in one program.
    shapes = jax.eval_shape(create)
    shardings = shapes.replace(
        step=jax.NamedSharding(mesh, jax.P()),
        params=plan.params.shardings,
        opt_state=plan.state.shardings,
    )
    state = jax.jit(create, out_shardings=shardings)()

    step = compiled(state)
    tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, jax.P("data")))
    losses = []
    for _ in range(60):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {int(state.step)} steps")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(60, state)
        checkpointer.wait()
        # Where the devices are those of the checkpoint, shapes are enough.
        state = checkpointer.restore_latest(shapes)
        state, loss = step(state, tokens)
        assert loss < losses[0]
        assert step._cache_size() == 1  # restored arrays are sharded as before
        assert jax.tree.map(lambda leaf: leaf.sharding, state.opt_state) == plan.state.shardings
        print(f"resumed, step {int(state.step)}: loss {loss:.4f}; compiled once")

        half = make_mesh(share=2)  # other devices: a plan for them says where everything goes
        state = checkpointer.restore_latest(shapes, placement=plan_on(half))
    step = compiled(state)
    for _ in range(3):
        state, loss = step(state, jax.device_put(TOKENS, jax.NamedSharding(half, jax.P("data"))))
    assert loss < losses[0]
    assert step._cache_size() == 1
    print(f"resumed on {half.size} devices, step {int(state.step)}: loss {loss:.4f}; compiled once")


if __name__ == "__main__":
    main()
