"""Calls that go on to their end: past Ctrl-C, and past the end of a program."""

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


class Uncut:
    """A thread that makes calls one after another, each to its end.

    Python raises Ctrl-C in the main thread alone. Orbax forgets the threads of a save that an
    exception from a signal handler has cut short, or whose end it was waiting for: they go on, or
    wait for something that never comes.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpointer")
        self._process = os.getpid()
        self._left: Future[Any] | None = None
        self._pool.submit(int).result()  # The thread is there before anything can be cut short.

    @property
    def is_elsewhere(self) -> bool:
        """Whether the thread is in the process that this one was forked from."""
        return os.getpid() != self._process

    def call(self, act: Callable[[], _T]) -> _T:
        """Returns what a call returns.

        An exception from a signal handler ends the waiting for it; what the call itself raises
        after that is raised here by the next one.

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
        """Starts a call that nobody waits for; those that follow begin after it."""
        self._pool.submit(act)

    def close(self) -> None:
        """Ends the thread."""
        if not self.is_elsewhere:
            self._pool.shutdown()


def at_exit(finish: _Finish) -> None:
    """Has something done when the main thread ends, while other threads can still start work.

    `atexit` comes too late: the pools of threads that Orbax writes with have ended by then. A
    process that is forked later does not do it. Where `finish` returns `False`, the exit code of
    the process is not 0.
    """
    _pending()[finish] = os.getpid()


def not_at_exit(finish: _Finish) -> None:
    """Calls it off; again is fine."""
    _pending().pop(finish, None)


@functools.cache
def _pending() -> dict[_Finish, int]:
    pending: dict[_Finish, int] = {}
    # No part of Python offers this in public; `concurrent.futures` ends its own pools so, and what
    # is registered later comes first.
    threading._register_atexit(_run, pending)  # type: ignore[attr-defined]
    return pending


def _run(pending: dict[_Finish, int]) -> None:
    here = [finish for finish, process in list(pending.items()) if process == os.getpid()]
    finished = [finish() for finish in here]
    if not all(finished):
        atexit.register(_fail)  # The last that is registered comes first.


def _fail() -> None:
    """Ends the process with 1, after all else: Python has settled its exit code by now."""
    atexit.unregister(_fail)
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(1)
