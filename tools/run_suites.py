"""Run every test suite, two at a time.

    python tools/run_suites.py

A process of pytest keeps little more than one core busy, and the suites need processes of their
own anyway: the packages' tests must not see the virtual devices of the integration tests. Lines
are printed as they come, each with the name of its suite.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock

from workspace import ROOT

PYTEST = (sys.executable, "-m", "pytest")
# The lanes take about as long as one another.
LANES: Sequence[Mapping[str, Sequence[str]]] = (
    {"unit": (*PYTEST, "packages"), "tooling": (*PYTEST, "tools")},
    {"integration": (*PYTEST, "tests-integration")},
)


def run_lanes(lanes: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, int]:
    """Runs commands, those of a lane one after another; gives their exit codes by name."""
    width = max(len(name) for lane in lanes for name in lane)
    printing = Lock()

    def run(lane: Mapping[str, Sequence[str]]) -> dict[str, int]:
        return {
            name: _run(command, f"{name:{width}} | ", printing) for name, command in lane.items()
        }

    with ThreadPoolExecutor(len(lanes)) as pool:
        results = list(pool.map(run, lanes))
    return {name: code for result in results for name, code in result.items()}


def main(lanes: Sequence[Mapping[str, Sequence[str]]] = LANES) -> int:
    """Runs the suites; 0 if all passed."""
    start = time.monotonic()
    codes = run_lanes(lanes)
    for name, code in codes.items():
        print(f"{'passed' if code == 0 else 'FAILED'}  {name}")
    print(f"{time.monotonic() - start:.0f} s")
    return 0 if all(code == 0 for code in codes.values()) else 1


def _run(command: Sequence[str], prefix: str, printing: Lock) -> int:
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        show = partial(print, flush=True)
        for line in process.stdout:
            with printing:
                show(f"{prefix}{line}", end="")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
