"""What a run works with: its flags, its text, its network, its devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.config import Config
from lm.data import Batches, Text, load_text
from lm.devices import take_devices
from lm.model import Transformer


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run works with.

    Attributes:
      config: the flags, the mesh filled in.
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


def make_job(config: Config, processes: int = 1) -> Job:
    """Returns what a configuration describes, over that many processes; writes nothing."""
    text = load_text(config.data, window=config.sequence_length + 1)
    config, mesh = take_devices(config, processes)
    return Job(config, text, Transformer(config.model), mesh)
