"""What is finished when a process ends, whether or not its program asks for it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

_Finish = Callable[[], None]


def at_exit(finish: _Finish) -> None:
    """Has something done when the main thread ends, while other threads can still start work.

    `atexit` comes too late: the pools of threads that Orbax writes with have ended by then. A
    process that is forked later does not do it.
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
    for finish, process in list(pending.items()):
        if process == os.getpid():
            finish()
