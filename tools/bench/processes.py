"""Training with two and four processes of this machine, next to one process with all devices.

    hatch run dev:python tools/bench/processes.py --side 256

Eight virtual CPU devices are shared out; the processes exchange their sums over the loopback
interface. Each round starts them anew, one process, two, and four, in turn. They have the same
program, so as many collectives; each holds its devices' part of the planned bytes; and after ten
steps the parameters are the same but for the order of sums.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _common import Figure, Row, counted, main, timed
from _steps import OPTIMIZERS
from tqdm import tqdm

ONE, NUMBERS, DEVICES = "one process", (1, 2, 4), 8
APART = 1e-5
FIGURES = {
    **{f"compile, {name}": Figure(ONE) for name in OPTIMIZERS},
    **{f"a step, {name}": Figure(ONE) for name in OPTIMIZERS},
    **{f"collectives, {name}": Figure(ONE, 1.0, "collectives") for name in OPTIMIZERS},
    **{f"bytes held, {name}": Figure("the plan", 1.001, "B") for name in OPTIMIZERS},
    **{
        f"parameters apart, {name}": Figure(f"{APART:g} of their norm", 1.0, "")
        for name in OPTIMIZERS
    },
}
MEMBER = Path(__file__).with_name("_member.py")


def free_address() -> str:
    """Returns an address on this machine that nothing listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return f"localhost:{found.getsockname()[1]}"


def run(number: int, side: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains with that many processes; returns what the first of them found, and parameters."""
    with tempfile.TemporaryDirectory() as folder:
        address = free_address()
        words = [str(word) for word in (number, DEVICES, side, folder)]
        logs = [Path(folder) / f"log_{i}" for i in range(number)]
        members = []
        for i, log in enumerate(logs):
            with log.open("w") as file:
                command = [sys.executable, str(MEMBER), address, f"{i}", *words]
                members.append(subprocess.Popen(command, stdout=file, stderr=file))
        try:
            failed = [i for i, member in enumerate(members) if member.wait(timeout=600)]
        finally:
            for member in members:
                member.kill()
        if failed:
            what = logs[failed[0]].read_text()[-4000:]
            raise SystemExit(f"{what}\nof {number} processes, number {failed[0]} failed")
        found = json.loads((Path(folder) / "found.json").read_text())
        with np.load(Path(folder) / "params.npz") as arrays:
            return found, dict(arrays)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--side", type=int, help="of matrices four times as wide: 256, or 64 with --quick"
    )
    parser.add_argument("--rounds", type=int, help="4, or 2 with --quick")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    side = options.side or (64 if options.quick else 256)
    rounds = options.rounds or (2 if options.quick else 4)
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in NUMBERS}
    params: dict[int, dict[str, Any]] = {}
    for _ in tqdm(range(rounds), leave=False, desc="rounds", disable=None):
        for number in NUMBERS:
            figures, params[number] = run(number, side)
            found[number].append(figures)
    for name in OPTIMIZERS:
        for number in NUMBERS[1:]:
            ours, theirs = ([row[name] for row in found[n]] for n in (number, 1))
            for what in ("compile", "a step"):
                times = ([row[what] for row in rows] for rows in (ours, theirs))
                yield timed(f"{what}, {name}", *times, size=number)
            for what, other in (
                ("collectives", theirs[0]["collectives"]),
                ("bytes held", ours[0]["planned"]),
            ):
                yield counted(f"{what}, {name}", ours[0][what], other, size=number)
            distance = apart(name, params[number], params[1])
            yield counted(f"parameters apart, {name}", distance, APART, size=number)


def apart(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Returns how far the parameters of one optimizer are apart, as a part of their norm."""
    paths = [path for path in theirs if path.startswith(f"{name}/")]
    distance = sum(np.sum((ours[path] - theirs[path]) ** 2.0) for path in paths)
    return float((distance / sum(np.sum(theirs[path] ** 2.0) for path in paths)) ** 0.5)


if __name__ == "__main__":
    # The processes are told the same.
    environment = {"JAX_PLATFORMS": "cpu"}
    main(__doc__, FIGURES, measure, arguments, environment=environment, sizes="processes")
