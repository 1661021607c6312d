"""Choice of devices for a run: a mesh that divides its batch and model evenly."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from lm.config import Config, UsageError
from lm.sizes import VOCAB

VIRTUAL_DEVICES = 8  # used if there is only a CPU
_settings: Any = jax.config


def take_devices(config: Config, processes: int) -> tuple[Config, Mesh]:
    """Returns the configuration, with `mesh` filled in by default, and the mesh.

    Raises:
      UsageError: no devices were found, or the mesh does not match them.
    """
    _make_virtual(virtual_devices(config, processes))
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # the platform is not installed
        said = " ".join(["", *str(error).split()])
        platform = _settings.jax_platforms or "any"
        raise UsageError(f"JAX finds no device of the platform {platform!r}{said}") from error
    config, taken = choose_devices(config, devices)
    shape = config.mesh_shape
    auto = (AxisType.Auto,) * 2
    return config, jax.make_mesh(shape, ("data", "model"), axis_types=auto, devices=taken)


def virtual_devices(config: Config, processes: int) -> int:
    """Returns the number of virtual devices per process if there is only a CPU.

    Raises:
      UsageError: the processes cannot have equal shares of `--mesh`.
    """
    if not config.mesh:
        return max(1, VIRTUAL_DEVICES // processes)
    size = math.prod(config.mesh_shape)
    if size % processes:
        raise UsageError(
            f"--mesh {config.mesh} does not divide: --processes {processes} must divide its "
            f"{size} devices"
        )
    return size // processes


def choose_devices(config: Config, devices: Sequence[Any]) -> tuple[Config, list[Any]]:
    """Returns the configuration with its mesh, and the devices that it takes.

    Args:
      config: the flags; where `mesh` is empty, it becomes the best one.
      devices: all that there are, those of other processes included.

    Raises:
      UsageError: there are too few for the mesh, or for any.
    """
    counts = Counter(device.process_index for device in devices)
    each, processes = min(counts.values()), len(counts)
    best = best_mesh(config, each * processes, processes)
    if not config.mesh:
        if best is None:
            raise UsageError(
                f"no mesh of {_named(devices)} in {processes} processes divides --batch-size "
                f"{config.batch_size}, --microbatches {config.microbatches} and --heads "
                f"{config.heads}; name one by --mesh"
            )
        config = dataclasses.replace(config, mesh=best)
    size = math.prod(config.mesh_shape)
    if size % processes or size // processes > each:
        hint = f"; --mesh {best} fits" if best else ""
        raise UsageError(
            f"--mesh {config.mesh} takes {size} devices, and there are {_named(devices)}{hint}"
        )
    taken: Counter[int] = Counter()
    chosen = []
    for device in devices:  # the same number in every process
        if taken[device.process_index] < size // processes:
            taken[device.process_index] += 1
            chosen.append(device)
    return config.check(), chosen


def best_mesh(config: Config, devices: int, processes: int) -> str | None:
    """Returns the mesh that uses most devices; among several, with data about twice model.

    Examples:
      >>> [best_mesh(Config(), n, 1) for n in (1, 2, 4, 6, 8)]  # doctest: +NORMALIZE_WHITESPACE
      ['data=1,model=1', 'data=2,model=1', 'data=4,model=1', 'data=4,model=1',
       'data=4,model=2']
    """
    found = [
        (data, model)
        for data in range(1, min(devices, config.batch_size) + 1)
        for model in range(1, devices // data + 1)
        if config.batch_size % (data * config.microbatches) == 0
        and config.heads % model == VOCAB % model == 0
        and data * model % processes == 0
    ]
    if not found:
        return None
    data, model = max(found, key=lambda m: (m[0] * m[1], -abs(math.log2(m[0] / m[1]) - 1), m[0]))
    return f"data={data},model={model}"


def _named(devices: Sequence[Any]) -> str:
    return f"{len(devices)} {devices[0].platform} device{'s' if len(devices) > 1 else ''}"


def _make_virtual(count: int) -> None:
    """Splits the CPU into virtual devices, unless the number is already configured."""
    is_settled = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not is_settled and _settings.jax_num_cpu_devices == -1:
        jax.config.update("jax_num_cpu_devices", count)
