"""Several processes that train together: how they meet, agree, stop at one step, and part."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.config import Cluster, UsageError

PARTING_SECONDS = 60


def is_first() -> bool:
    """Whether this process writes the files and speaks for all."""
    return jax.process_index() == 0


def say(*lines: object) -> None:
    """Prints lines, once for all processes."""
    if is_first():
        print(*lines, sep="\n", flush=True)


@contextlib.contextmanager
def together(cluster: Cluster) -> Iterator[None]:
    """Meets the other processes, and parts from them however this one ends.

    Who leaves without a word may hang while the interpreter ends, and so may the others.

    Raises:
      UsageError: they cannot meet.
    """
    if cluster.processes == 1:
        yield
        return
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.process_id,
            heartbeat_timeout_seconds=cluster.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the processes do not meet: {error}") from error
    try:
        yield
        multihost_utils.sync_global_devices("the end")
    finally:
        # One that failed alone waits here for others that wait elsewhere, though not for ever.
        guard = threading.Timer(PARTING_SECONDS, os._exit, (1,))
        guard.daemon = True
        guard.start()
        jax.distributed.shutdown()
        guard.cancel()


def first_of_all(act: Callable[[], object]) -> None:
    """Lets the first process do something, and the others wait for it.

    Raises:
      UsageError: it fails; then it does so for all.
    """
    failure = None
    if is_first():
        try:
            act()
        except UsageError as error:
            failure = error
    if multihost_utils.broadcast_one_to_all(np.bool_(failure is not None)):
        raise failure or UsageError("process 0 cannot go on; it says why")


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Turns Ctrl-C and SIGTERM into a question that the loop asks once after every step.

    A second signal acts as it always does. Among several processes, JAX's preemption service has
    SIGTERM and makes them agree about the step, without communication between devices; Ctrl-C is
    passed on to it.

    Yields:
      Whether to stop after that step; the same answer in all processes.
    """
    caught: list[int] = []
    before: dict[int, Any] = {}
    is_alone = jax.process_count() == 1

    def catch(number: int, _: object) -> None:
        caught.append(number)
        signal.signal(number, before[number])
        if not is_alone:
            os.kill(os.getpid(), signal.SIGTERM)

    ours = [signal.SIGINT, signal.SIGTERM] if is_alone else [signal.SIGINT]
    for number in map(int, ours):
        before[number] = signal.signal(number, catch)
    try:
        if is_alone:
            yield lambda step: bool(caught)
        else:
            yield multihost_utils.reached_preemption_sync_point
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
