"""Starts programs of `kill_worker` and ends them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 240.0  # seconds; far more than anything takes on a machine that is not overloaded


class Workers:
    """A server of processes; `close` ends it and whatever it has started."""

    def __init__(self, folder: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        self._folder = folder
        self._count = 0
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore:os.fork", HERE / "kill_worker.py"],
            env=kept | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer()

    def start(self, program: str, *args: object, **options: Any) -> Worker:
        """Starts a program of `kill_worker` in a process of its own."""
        self._count += 1
        log = self._folder / f"log-{self._count}"
        job = {"program": program, "args": list(map(str, args)), "options": options}
        return Worker(self.ask, int(self.ask(job | {"log": str(log)})), log)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


class Worker:
    """A process."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], pid: int, log: Path) -> None:
        self._ask, self._pid, self._log = ask, pid, log
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; `None` while it runs."""
        if self._code is None:
            self._code = self._ask({"wait": self._pid})
        return self._code

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def wait(self, seconds: float = LIMIT) -> int:
        """Its exit code; an error, with what it printed, where it does not end in time."""
        wait_for(lambda: self.poll() is not None, seconds, self.aborted)
        code = self.poll()
        assert code is not None
        return code

    def aborted(self) -> str:
        """What it printed, and where it was, of one that does not go on; it is ended."""
        self.kill(signal.SIGABRT)
        deadline = time.monotonic() + 10
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.output()

    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def wait_for(
    done: Callable[[], bool], seconds: float = LIMIT, said: Callable[[], str] = str
) -> float:
    """Waits until something is so; returns how long that took."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() < start + seconds, f"not within {seconds} s\n{said()}"
        time.sleep(0.02)
    return time.monotonic() - start


def read_events(file: Path) -> list[list[str]]:
    """What a program noted, line by line."""
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def last_steps(events: list[list[str]]) -> tuple[int, int]:
    """The last step whose save has begun, and the last that is known to have ended."""
    begun = [int(e[1]) for e in events if e[0] == "begin"]
    ended = [int(e[1]) for e in events if e[0] == "end"]
    return max(begun, default=0), max(ended, default=0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def pause(random_: random.Random, seconds: float) -> None:
    time.sleep(random_.uniform(0, seconds))
