"""Checks that a run fits into memory before anything is created."""

from __future__ import annotations

import os

from opt_partition import MemoryPlan

from lm.config import UsageError
from lm.job import Job
from lm.placement import amount
from lm.sizes import VOCAB


def check_memory(job: Job, plan: MemoryPlan) -> None:
    """Compares the memory needed by the devices of this process with what is available.

    Otherwise the system would swap, or kill the program without a message.

    Raises:
      UsageError: memory is insufficient; the message says which flags to lower.
    """
    held = plan.total_bytes_per_device
    for needed, flags in (
        (held, "--d-model or --layers"),
        (
            held + _least_activations(job),
            "--batch-size or --sequence-length, or more --microbatches",
        ),
    ):
        for takes, there, has in _limits(job, needed):
            if takes > there:
                raise UsageError(
                    f"a training step takes at least {amount(takes)}, and {has} {amount(there)}: "
                    f"take a smaller {flags}"
                )


def _least_activations(job: Job) -> int:
    """Returns a lower bound on activations: the attention of one layer, and the logits."""
    config = job.config
    data, model = config.mesh_shape
    sequences = config.batch_size // (data * config.microbatches)
    per_position = config.heads * config.sequence_length + VOCAB
    return 4 * sequences * config.sequence_length * per_position // model


def _limits(job: Job, needed: int) -> list[tuple[int, int, str]]:
    """What is needed of each memory, what there is, and where; of which nothing is known, none."""
    devices = job.mesh.local_devices
    if devices[0].platform == "cpu":  # all devices share it
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return [(needed * len(devices), there, "this computer has")]
    stats = [(device, device.memory_stats() or {}) for device in devices]
    return [
        (needed, stat["bytes_limit"], f"{device} has")
        for device, stat in stats
        if "bytes_limit" in stat
    ]
