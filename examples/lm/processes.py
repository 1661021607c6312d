"""Training with several processes: how they connect, agree, stop at one step, and shut down."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Never

import jax
import numpy as np
from jax.experimental import multihost_utils

from lm.config import Cluster, UsageError
from lm.progress import announced

MEETING_SECONDS = 300
PARTING_SECONDS = 60


def is_first() -> bool:
    """Whether this process writes the files and prints messages."""
    return jax.process_index() == 0


def say(*lines: object) -> None:
    """Prints lines, once for all processes."""
    if is_first():
        print(*lines, sep="\n", flush=True)


@contextlib.contextmanager
def together(cluster: Cluster) -> Iterator[None]:
    """Connects to the other processes, and disconnects from them however this one ends.

    Who leaves without a word may hang while the interpreter ends, and so may the others.

    Raises:
      UsageError: they cannot meet.
    """
    if cluster.processes == 1:
        yield
        return
    _meet(cluster)
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


def _meet(cluster: Cluster) -> None:
    """Connects to the other processes; ends this one where they do not come, or on Ctrl-C.

    Raises:
      UsageError: they cannot meet.
    """
    if cluster.coordinator and cluster.process_id == 0:
        _check_port(cluster.coordinator)
    failures: list[Exception] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                cluster.coordinator,
                cluster.processes,
                cluster.process_id,
                initialization_timeout=2 * MEETING_SECONDS,  # when it ends, the client aborts
                heartbeat_timeout_seconds=cluster.heartbeat_timeout,
            )
        except Exception as error:  # whatever a scheduler's environment has
            failures.append(error)

    # It blocks signals while waiting, so run it in a thread.
    thread = threading.Thread(target=connect, daemon=True)
    what = f"Waiting for the other processes, at most {MEETING_SECONDS} s"
    try:
        with announced(what, is_shown=True):
            thread.start()
            thread.join(MEETING_SECONDS)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    if thread.is_alive():
        where = f"--coordinator {cluster.coordinator}" if cluster.coordinator else "the coordinator"
        _leave(
            f"error: --processes {cluster.processes} did not all meet at {where} within "
            f"{MEETING_SECONDS} s: start each, with the same flags and a --process-id of its own",
            2,
        )
    if failures:
        raise UsageError(
            f"--processes {cluster.processes} do not meet: {failures[0]} (give each a "
            "--process-id, and all the same --coordinator)"
        ) from failures[0]


def _check_port(coordinator: str) -> None:
    """Raises `UsageError` for a port that is taken, at which jax 0.10.2 crashes."""
    try:
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    except OSError as error:
        raise UsageError(f"--coordinator {coordinator} cannot be had: {error.strerror}") from error


def _leave(last_words: str, code: int) -> Never:
    """Ends the process at once: JAX's service would add words of its own, and its client abort."""
    print(f"train_lm: {last_words}", file=sys.stderr, flush=True)
    os._exit(code)


def first_of_all(act: Callable[[], object]) -> None:
    """Runs something in the first process while the others wait for it.

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
    """Turns Ctrl-C and SIGTERM into a flag that the loop checks after every step.

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
