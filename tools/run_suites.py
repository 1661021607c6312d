"""Run every test suite, two at a time.

    python tools/run_suites.py

A process of pytest keeps little more than one core busy, and the suites need processes of their
own anyway: the packages' tests must not see the virtual devices of the integration tests. Lines
are printed as they come, each with the name of its suite; which tests failed is said again at the
end, for logs of which the end is kept.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Result:
    """How a suite ended.

    Attributes:
      code: its exit code.
      failures: pytest's lines about what failed.
    """

    code: int
    failures: Sequence[str] = ()


def run_lanes(lanes: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, Result]:
    """Runs commands, those of a lane one after another; gives their results by name."""
    width = max(len(name) for lane in lanes for name in lane)
    printing = Lock()

    def run(lane: Mapping[str, Sequence[str]]) -> dict[str, Result]:
        return {
            name: _run(command, f"{name:{width}} | ", printing) for name, command in lane.items()
        }

    with ThreadPoolExecutor(len(lanes)) as pool:
        results = list(pool.map(run, lanes))
    return {name: result for lane in results for name, result in lane.items()}


def main(lanes: Sequence[Mapping[str, Sequence[str]]] = LANES) -> int:
    """Runs the suites; 0 if all passed."""
    start = time.monotonic()
    results = run_lanes(lanes)
    for name, result in results.items():
        print(f"{'passed' if result.code == 0 else 'FAILED'}  {name}")
        print(*result.failures, sep="", end="")
    print(f"{time.monotonic() - start:.0f} s")
    return 0 if all(result.code == 0 for result in results.values()) else 1


def _run(command: Sequence[str], prefix: str, printing: Lock) -> Result:
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
        failures = []
        for line in process.stdout:
            with printing:
                show(f"{prefix}{line}", end="")
            if line.startswith(("FAILED ", "ERROR ")):
                failures.append(line)
    return Result(process.returncode, tuple(failures))


if __name__ == "__main__":
    sys.exit(main())
