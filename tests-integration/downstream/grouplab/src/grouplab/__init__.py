"""A framework in miniature: parameter groups, each with an Adafactor, in files of msgpack."""

import pathlib
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
from opt_adafactor import Adafactor
from opt_core import FROZEN, MultiOptimizer

BATCH = jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16)


class Trainer:
    """Trains a model of two layers, the embedding frozen; a folder that has a run is resumed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.file = folder / "optimizer.msgpack"
        groups = MultiOptimizer.from_rules(
            [
                ("kernels", r".*kernel", Adafactor(1e-2, min_dim_size_to_factor=8)),
                ("biases", r".*bias", Adafactor(1e-2, multiply_by_parameter_scale=False)),
            ],
            rest=FROZEN,
        )
        self.optimizer = groups.create(init_params())
        if self.file.exists():
            saved = flax.serialization.msgpack_restore(self.file.read_bytes())
            self.optimizer = self.optimizer.restore_state(saved)
        self.frozen = self.optimizer.target["embedding"]
        self.update = jax.jit(lambda o: o.apply_gradient(jax.grad(loss_fn)(o.target)))

    @property
    def steps(self) -> int:
        """How many updates have been made."""
        return int(self.optimizer.state.step)

    def run(self, until: int) -> None:
        """Trains to step `until`, and saves."""
        while self.steps < until:
            self.optimizer = self.update(self.optimizer)
        saved = jax.device_get(self.optimizer.state_dict())
        self.file.write_bytes(flax.serialization.msgpack_serialize(saved))

    def loss(self) -> float:
        """The loss."""
        return float(loss_fn(self.optimizer.target))

    def is_as_promised(self) -> bool:
        """Whether what is frozen stayed so: nothing is sharded here."""
        return bool((self.optimizer.target["embedding"] == self.frozen).all())


def init_params() -> Any:
    """Returns the parameters of step 0."""
    return {
        "embedding": jnp.eye(16),
        "layer": {"kernel": jnp.full((16, 16), 0.05), "bias": jnp.zeros(16)},
    }


def loss_fn(params: Any) -> jax.Array:
    """Returns the error of an autoencoder."""
    hidden = BATCH @ params["embedding"]
    out = hidden @ params["layer"]["kernel"] + params["layer"]["bias"]
    return jnp.mean((out - BATCH) ** 2)
