"""XLA's compiler for GPUs on a machine without one: a target that is described, and its devices.

The wheel `jax-cuda12-pjrt` holds the compiler; `hatch run gpu-programs:python ...` has it. Programs
for these devices can be compiled and read, and not run.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

WHEEL = "jax-cuda12-pjrt"
ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # there is no CUDA to be of the right version
    "TF_CPP_MIN_LOG_LEVEL": "2",  # nor a driver
}
"""Variables that have to be set before JAX looks for its plugins."""

NAME = "NVIDIA H100 80GB HBM3"
_TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 cuda_compute_capability {{ major: 9 }}
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
}}
runtime_version: {{ major: 12 minor: 8 patch: 0 }}
dnn_version_info {{ major: 9 minor: 7 }}
platform_name: "CUDA"
device_description_str: "{NAME}"
"""


def version() -> str | None:
    """Returns the version of the compiler; `None` where it is not installed."""
    try:
        return importlib.metadata.version(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices(number: int) -> list[Any]:
    """Returns the devices of one host with that many GPUs."""
    os.environ.update(ENVIRONMENT)
    from jax.experimental import topologies

    described = topologies.get_topology_desc(
        "h100", "cuda", target_config=_TARGET, topology=f"1x1x{number}"
    )
    return list(described.devices)
