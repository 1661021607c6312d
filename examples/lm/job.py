"""What a run works with: its flags, its text, its network, its devices."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lm.config import Config, UsageError
from lm.data import Batches, Text, load_text
from lm.model import Transformer


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run works with.

    Attributes:
      config: the flags.
      text: what is read.
      model: the network.
      mesh: the devices.
    """

    config: Config
    text: Text
    model: Transformer
    mesh: Mesh

    @property
    def rows(self) -> NamedSharding:
        """How batches are placed: some sequences on every row of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def shard(self, batch: npt.NDArray[Any]) -> jax.Array:
        """Returns a batch on the mesh; each process gives the sequences of its own devices."""
        return jax.make_array_from_callback(batch.shape, self.rows, batch.__getitem__)

    def batches(self) -> Batches:
        """Returns the batches to learn from, from the first on."""
        config = self.config
        window = config.sequence_length + 1
        return Batches(self.text.train, config.seed, batch_size=config.batch_size, window=window)


def make_mesh(config: Config, processes: int) -> Mesh:
    """Returns the mesh; without `JAX_PLATFORMS`, its devices are virtual ones on the CPU."""
    shape = config.mesh_shape
    devices, rest = divmod(math.prod(shape), processes)
    if rest:
        raise UsageError(
            f"--mesh {config.mesh} does not divide: --processes {processes} must divide its "
            f"{math.prod(shape)} devices"
        )
    jax.config.update("jax_num_cpu_devices", devices)
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if math.prod(shape) > len(jax.devices()):
        raise UsageError(f"--mesh {config.mesh} needs more than {len(jax.devices())} devices")
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def make_job(config: Config, processes: int = 1) -> Job:
    """Returns what a configuration describes, over that many processes; writes nothing."""
    text = load_text(config.data, window=config.sequence_length + 1)
    return Job(config, text, Transformer(config.model), make_mesh(config, processes))
