"""The parts of a run: flags, text, model and devices."""

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
    """The parts of a run.

    Attributes:
      config: the flags, with the mesh filled in.
      text: the training and evaluation text.
      model: the model.
      mesh: the device mesh.
    """

    config: Config
    text: Text
    model: Transformer
    mesh: Mesh

    @property
    def rows(self) -> NamedSharding:
        """The sharding of batches: sequences are split over `data`."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    def shard(self, batch: npt.NDArray[Any]) -> jax.Array:
        """Places a batch on the mesh; each process provides the sequences of its own devices."""
        return jax.make_array_from_callback(batch.shape, self.rows, batch.__getitem__)

    def batches(self) -> Batches:
        """Returns the training batches, starting with the first."""
        config = self.config
        window = config.sequence_length + 1
        return Batches(self.text.train, config.seed, batch_size=config.batch_size, window=window)


def make_job(config: Config, processes: int = 1) -> Job:
    """Creates the job for a configuration and a number of processes; writes nothing."""
    text = load_text(config.data, window=config.sequence_length + 1)
    config, mesh = take_devices(config, processes)
    return Job(config, text, Transformer(config.model), mesh)
