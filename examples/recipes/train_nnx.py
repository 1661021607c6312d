"""A model of Flax NNX on a mesh, fine-tuned by LoRA, with `opt_nnx` for `nnx.Optimizer`.

    python -m pip install opt-checkpoint opt-nnx
    python examples/recipes/train_nnx.py

1. Pretraining: AdamW for matrices, Adafactor for the embedding, state sharded like the parameters
   and over the data axis too; a learning rate for each step; a checkpoint, resumed on half of the
   devices and on all of them.
2. Fine-tuning of the restored model, as in Tunix: only the LoRA factors are trained.

A CPU is split into 8 virtual devices.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import opt_nnx
import opt_optax_bridge as opt
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_checkpoint import Checkpointer, plan_restore
from opt_core import MultiOptimizer, describe

VOCAB, EMBED, MLP, RANK = 64, 32, 64, 4
RULES = [("vocab", "model"), ("embed", None), ("mlp", "model")]


class Block(nnx.Module):
    """Two matrices with named dimensions, the first with a LoRA."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        names = nnx.with_partitioning(init, ("embed", "mlp"))
        self.wi = nnx.Linear(EMBED, MLP, use_bias=False, kernel_init=names, rngs=rngs)
        names = nnx.with_partitioning(init, ("mlp", "embed"))
        self.wo = nnx.Linear(MLP, EMBED, use_bias=False, kernel_init=names, rngs=rngs)
        self.lora = nnx.LoRA(EMBED, RANK, MLP, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the residual sum."""
        return x + self.wo(jnp.tanh(self.wi(x) + self.lora(x)))


class Model(nnx.Module):
    """Predicts each token from the previous one."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        names = nnx.with_partitioning(nnx.initializers.normal(0.1), ("vocab", "embed"))
        self.embed = nnx.Embed(VOCAB, EMBED, embedding_init=names, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        return self.embed.attend(self.block(self.embed(tokens)))


def create(mesh: jax.sharding.Mesh) -> Model:
    """Returns a model that is created sharded."""

    @nnx.jit
    def sharded() -> Model:
        model = Model(nnx.Rngs(0))
        state = nnx.state(model)
        shardings = nnx.get_named_sharding(state, mesh)
        nnx.update(model, jax.lax.with_sharding_constraint(state, shardings))
        return model

    return sharded()


def batches(shift: int, mesh: jax.sharding.Mesh) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yields tokens and the ones that follow: the task is to learn the shift."""
    key = jax.random.key(shift)
    while True:
        key, own = jax.random.split(key)
        tokens = jax.random.randint(own, (256,), 0, VOCAB)
        pair = tokens, (tokens * 5 + shift) % VOCAB
        yield jax.device_put(pair, NamedSharding(mesh, P("data")))


def loss(model: Model, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()


def make_update(model: Any, optimizer: Any, batch: Any, rate: Any, *, wrt: Any) -> Any:
    """Makes one update; the learning rate is an argument, so it does not recompile."""
    grad = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))
    value, grads = grad(model, *batch)
    optimizer.update(model, grads, learning_rate=rate)
    return value


train_step: Any = nnx.jit(make_update, static_argnames="wrt")


def train(model: Any, optimizer: Any, data: Any, rate: float, steps: int) -> float:
    """Returns the last loss."""
    for step in range(steps):
        factor = min(1.0, (step + 1) / 20)
        # Read in every step: a CPU of many virtual devices must not run many programs at once.
        value = float(train_step(model, optimizer, next(data), factor * rate, wrt=optimizer.wrt))
    return value


def pretrainer(model: Model) -> opt_nnx.Optimizer[Model]:
    """Returns the optimizer of the first part: groups, and state sharded over the data axis."""
    groups = MultiOptimizer.from_rules(
        [("embedding", r"embed/.*", opt.adafactor(1e-2, min_dim_size_to_factor=16))],
        rest=opt.adamw(1e-2, weight_decay=1e-3),
    )
    return opt_nnx.Optimizer(model, groups, zero="data")


def make_mesh(share: int = 1) -> jax.sharding.Mesh:
    """Returns a mesh of all devices, or of a share; a CPU is split into 8 virtual ones."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    devices = jax.devices()[: max(jax.device_count() // share, 1)]
    width = 2 if len(devices) % 2 == 0 else 1
    shape, types = (len(devices) // width, width), (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "model"), axis_types=types, devices=devices)


def pair_on(mesh: jax.sharding.Mesh) -> tuple[Model, opt_nnx.Optimizer[Model]]:
    """Returns the model and its optimizer; `nnx.eval_shape` of it is the target of a restore."""
    model = create(mesh)
    return model, pretrainer(model)


def resume_on_half(checkpointer: Checkpointer) -> None:
    """Continues on half of the devices: the optimizer shards its state on their mesh."""
    mesh = make_mesh(share=2)
    with jax.set_mesh(mesh):
        pair = checkpointer.restore_latest(nnx.eval_shape(lambda: pair_on(mesh)))
        compiled = train_step.jitted_fn._cache_size()
        value = train(*pair, batches(1, mesh), 1e-2, steps=3)
        assert train_step.jitted_fn._cache_size() == compiled + 1
        print(f"resumed on {mesh.size} devices: loss {value:.3f}; compiled once")


def main() -> None:
    """Runs both parts."""
    mesh = make_mesh()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES), tempfile.TemporaryDirectory() as run:
        model, optimizer = pair_on(mesh)
        print(describe(optimizer.to_core(model)))
        value = train(model, optimizer, batches(1, mesh), 1e-2, steps=120)
        print(f"pretraining: loss {value:.3f} after {int(optimizer.step[...])} steps")
        with Checkpointer(run) as checkpointer:
            checkpointer.save(120, (model, optimizer))
            checkpointer.wait()
            resume_on_half(checkpointer)
            target = nnx.eval_shape(lambda: pair_on(mesh))
            plan = plan_restore(checkpointer.at(120), target)
            model, optimizer = plan.apply()
        print(f"restored at step {int(optimizer.step[...])}: {str(plan).splitlines()[0]}")

        tuner = opt_nnx.Optimizer(model, opt.adam(1e-2), wrt=nnx.LoRAParam)
        frozen = model.block.wi.kernel[...]
        data = batches(2, mesh)
        before = float(loss(model, *next(data)))
        after = train(model, tuner, data, 2e-2, steps=120)
        assert (model.block.wi.kernel[...] == frozen).all()
        print(f"fine-tuning: loss {before:.3f} to {after:.3f}, by LoRA alone; compiled once each")
        # One program for each optimizer, and one for the first on half of the devices.
        assert train_step.jitted_fn._cache_size() == 3


if __name__ == "__main__":
    main()
