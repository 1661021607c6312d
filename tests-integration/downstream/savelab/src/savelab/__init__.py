"""A framework in miniature: an Optax optimizer that is changed in the middle of a run."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
from opt_checkpoint import Checkpointer
from opt_checkpoint.errors import MissingError

BATCH = jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16)


class Trainer:
    """Trains a matrix; a folder that has a run is resumed, with a clip in front from there on."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.checkpointer = Checkpointer(folder)
        adamw = opt.adamw(1e-2)
        clipped = opt.chain(opt.clip_by_global_norm(1e3), adamw)
        try:
            target = jax.eval_shape(clipped.create, init_params())
            self.optimizer: Any = self.checkpointer.restore_latest(target, allow={"optimizer"})
        except MissingError:
            self.optimizer = adamw.create(init_params())
        self.traces = 0
        self.update = jax.jit(self._update)

    def _update(self, optimizer: Any, rate: Any) -> Any:
        self.traces += 1
        grads = jax.grad(loss_fn)(optimizer.params)
        return optimizer.apply_gradient(grads, learning_rate=rate)

    @property
    def steps(self) -> int:
        """How many updates have been made."""
        return int(self.optimizer.step)

    def run(self, until: int) -> None:
        """Trains to step `until`, and saves."""
        while self.steps < until:
            self.optimizer = self.update(self.optimizer, 1e-2 / (1 + self.steps))
        self.checkpointer.save(until, self.optimizer)
        self.checkpointer.close()

    def loss(self) -> float:
        """The loss."""
        return float(loss_fn(self.optimizer.params))

    def is_as_promised(self) -> bool:
        """Whether the step was compiled once: nothing is sharded here."""
        return self.traces <= 1


def init_params() -> Any:
    """Returns the parameters of step 0."""
    return {"w": jnp.full((16, 16), 0.05)}


def loss_fn(params: Any) -> jax.Array:
    """Returns the error of an autoencoder."""
    return jnp.mean((BATCH @ params["w"] - BATCH) ** 2)
