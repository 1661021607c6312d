"""Calls that always finish: after Ctrl-C, and after the end of the main thread."""

from __future__ import annotations

import atexit
import contextvars
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from opt_checkpoint.errors import LockError

_T = TypeVar("_T")
_Finish = Callable[[], bool]


class UninterruptedCalls:
    """A thread that runs calls one after another, each to its end.

    Python raises Ctrl-C in the main thread only. If an exception from a signal handler interrupts
    Orbax in a save, or while it waits for one, it loses track of the threads of the save: they
    continue, or wait for ever.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpointer")
        self._process = os.getpid()
        self._left: Future[Any] | None = None
        self._pool.submit(int).result()  # The thread exists before anything can be interrupted.

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process was forked from that of the thread."""
        return os.getpid() != self._process

    def call(self, act: Callable[[], _T]) -> _T:
        """Returns what a call returns.

        An exception from a signal handler only ends the waiting; what the call itself raises
        later is raised by the next call.

        Raises:
          LockError: in a process that was forked.
        """
        if self.is_elsewhere:
            raise LockError("this process was forked from the one that saves: save there")
        left, self._left = self._left, None
        future = self._pool.submit(contextvars.copy_context().run, act)
        try:
            result = future.result()
        finally:
            if not future.done():
                self._left = future
        if left is not None:
            left.result()
        return result

    def start(self, act: Callable[[], object]) -> None:
        """Starts a call without waiting for it; later calls run after it."""
        self._pool.submit(act)

    def close(self) -> None:
        """Ends the thread."""
        if not self.is_elsewhere:
            self._pool.shutdown()


def at_exit(finish: _Finish) -> None:
    """Registers a function to run when the main thread ends, while threads can still start work.

    `atexit` comes too late: the thread pools of Orbax have ended by then. A process that is forked
    later does not run it. If `finish` returns `False`, the exit code of the process is not 0.
    """
    _pending()[finish] = os.getpid()


def not_at_exit(finish: _Finish) -> None:
    """Unregisters it; may be repeated."""
    _pending().pop(finish, None)


@functools.cache
def _pending() -> dict[_Finish, int]:
    pending: dict[_Finish, int] = {}
    # Python has no public equivalent; `concurrent.futures` ends its own pools this way, and what is
    # registered later runs first.
    threading._register_atexit(_run, pending)  # type: ignore[attr-defined]
    return pending


def _run(pending: dict[_Finish, int]) -> None:
    here = [finish for finish, process in list(pending.items()) if process == os.getpid()]
    finished = [finish() for finish in here]
    if not all(finished):
        atexit.register(_fail)  # what is registered last runs first


def _fail() -> None:
    """Ends the process with 1 after everything else: its exit code can no longer be set."""
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)
