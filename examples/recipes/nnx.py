"""A model of Flax NNX on a mesh, fine-tuned by LoRA, with `opt_nnx` for `nnx.Optimizer`.

    python -m pip install opt-checkpoint opt-nnx
    python examples/recipes/nnx.py

1. Pretraining: AdamW for matrices, Adafactor for the embedding, state sharded like the parameters
   and over the data axis too; a learning rate for each step; a checkpoint.
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


def main() -> None:
    """Runs both parts."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    count = len(jax.devices())
    width = 2 if count % 2 == 0 else 1
    shape, axes = (count // width, width), ("data", "model")
    mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES), tempfile.TemporaryDirectory() as run:
        model = create(mesh)
        optimizer = pretrainer(model)
        print(describe(optimizer.to_core(model)))
        value = train(model, optimizer, batches(1, mesh), 1e-2, steps=120)
        print(f"pretraining: loss {value:.3f} after {int(optimizer.step[...])} steps")
        with Checkpointer(run) as checkpointer:
            checkpointer.save(120, (model, optimizer))
            checkpointer.wait()
            fresh = create(mesh)
            plan = plan_restore(checkpointer.at(120), (fresh, pretrainer(fresh)))
            model, optimizer = plan.apply()
        print(f"restored at step {int(optimizer.step[...])}: {str(plan).splitlines()[0]}")

        tuner = opt_nnx.Optimizer(model, opt.adam(1e-2), wrt=nnx.LoRAParam)
        frozen = model.block.wi.kernel[...]
        data = batches(2, mesh)
        before = float(loss(model, *next(data)))
        after = train(model, tuner, data, 2e-2, steps=120)
        assert (model.block.wi.kernel[...] == frozen).all()
        print(f"fine-tuning: loss {before:.3f} to {after:.3f}, by LoRA alone; compiled once each")
        # One program for each optimizer. JAX drops the specs of results on a single device, which
        # makes the second step another program there.
        assert train_step.jitted_fn._cache_size() == 2 or count == 1


if __name__ == "__main__":
    main()
