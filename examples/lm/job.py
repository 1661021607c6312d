"""What a run works with: its flags, its text, its network, its devices."""

from __future__ import annotations

import dataclasses
import math
import os

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lm.config import Config, UsageError
from lm.data import Text, load_text
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


def make_mesh(config: Config) -> Mesh:
    """Returns the mesh; without `JAX_PLATFORMS`, its devices are virtual ones on the CPU."""
    shape = config.mesh_shape
    jax.config.update("jax_num_cpu_devices", math.prod(shape))
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if math.prod(shape) > len(jax.devices()):
        raise UsageError(f"--mesh {config.mesh} needs more than {len(jax.devices())} devices")
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def make_job(config: Config) -> Job:
    """Returns what a configuration describes; writes nothing."""
    text = load_text(config.data, window=config.sequence_length + 1)
    return Job(config, text, Transformer(config.model), make_mesh(config))
