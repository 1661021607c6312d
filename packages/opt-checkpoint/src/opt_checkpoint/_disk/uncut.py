"""Calls that Ctrl-C does not cut short: Python raises it in the main thread alone."""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from opt_checkpoint.errors import LockError

_T = TypeVar("_T")


class Uncut:
    """A thread that makes calls one after another, each to its end.

    Orbax forgets the threads of a save that an exception from a signal handler has cut short, or
    whose end it was waiting for: they go on, or wait for something that never comes.
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
