"""Not too many programs at once on XLA's CPU client."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

_T = TypeVar("_T")


def paced(arrays: _T) -> _T:
    """Returns the arrays; of several CPU devices, once they are computed.

    To be called round what a loop over leaves starts. XLA's CPU client launches a program for
    several devices on the threads that also run it, one for each device or core. With 32 programs
    in flight on a device, the launch of the next blocks these threads, and where a program in
    flight has a collective, its parts wait for ever for threads to meet on
    (`max_inflight_computations` in `xla/pjrt/cpu/cpu_client.cc`, seen with jaxlib 0.10.2).
    Accelerators have queues of their own: there, nothing waits.

    Args:
      arrays: a pytree of `jax.Array`s, which have been started.
    """
    if any(_is_on_many_cpus(leaf) for leaf in jax.tree.leaves(arrays)):
        jax.block_until_ready(arrays)
    return arrays


def _is_on_many_cpus(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array):
        return False
    devices: Any = leaf.sharding.device_set
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"
