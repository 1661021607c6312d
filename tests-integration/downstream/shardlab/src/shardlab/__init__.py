"""A framework in miniature: plain Optax, state sharded over a mesh (ZeRO), microbatches."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from opt_accumulate import accumulate_gradients
from opt_partition import init_sharded, memory_plan

AXES = {"wi": ("embed", "mlp"), "wo": ("mlp", "embed")}
RULES = [("mlp", "model"), ("embed", None)]


class Trainer:
    """Trains a model of two matrices; a folder that has a run is resumed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.file = folder / "state.npz"
        self.tx = optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9)
        auto = (AxisType.Auto,) * 2
        mesh = jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"), axis_types=auto)
        shapes = jax.eval_shape(init_params)
        self.plan = memory_plan(self.tx, shapes, AXES, RULES, mesh, zero="data", zero_min_bytes=0)
        self.shardings = (self.plan.params.shardings, self.plan.state.shardings)
        params = jax.jit(init_params, out_shardings=self.shardings[0])()
        self.carry: Any = (params, init_sharded(self.tx, params, self.plan.state))
        self.steps = 0
        if self.file.exists():
            saved = np.load(self.file)
            self.steps = int(saved["steps"])
            leaves, structure = jax.tree.flatten(self.carry)
            read = [saved[f"leaf_{i}"] for i in range(len(leaves))]
            self.carry = jax.device_put(jax.tree.unflatten(structure, read), self.shardings)
        self.update = jax.jit(self._update, out_shardings=self.shardings, donate_argnums=0)

    def _update(self, carry: Any, batch: Any) -> Any:
        params, state = carry
        _, grads = accumulate_gradients(loss_fn, num_microbatches=4)(params, batch)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(self, until: int) -> None:
        """Trains to step `until`, and saves."""
        for step in range(self.steps, until):
            self.carry = self.update(self.carry, make_batch(step))
        self.steps = until
        leaves = {f"leaf_{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self.carry))}
        np.savez(self.file, allow_pickle=False, steps=until, **leaves)

    def loss(self) -> float:
        """The mean loss of a batch that is not trained on."""
        total, count = loss_fn(self.carry[0], make_batch(-1))
        return float(total / count)

    def is_as_promised(self) -> bool:
        """Whether this device holds what the plan says."""
        leaves = jax.tree.leaves(self.carry[1])
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
        whole = sum(leaf.nbytes for leaf in leaves)
        return bool(held == self.plan.state.bytes_per_device < whole)


def init_params() -> Any:
    """Returns the parameters of step 0."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "wi": 0.1 * jax.random.normal(keys[0], (16, 64)),
        "wo": 0.1 * jax.random.normal(keys[1], (64, 16)),
    }


def make_batch(step: int) -> Any:
    """Returns rows, and which of them count."""
    x = jax.random.normal(jax.random.key(step + 10), (32, 16))
    return {"x": x, "mask": jnp.arange(32) % 3 > 0}


def loss_fn(params: Any, batch: Any) -> Any:
    """Returns the sum of the losses of an autoencoder, and how many there are."""
    error = jnp.tanh(batch["x"] @ params["wi"]) @ params["wo"] - batch["x"]
    return jnp.where(batch["mask"], (error**2).mean(1), 0.0).sum(), batch["mask"].sum()
