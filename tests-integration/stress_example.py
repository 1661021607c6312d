"""Runs of `examples/train_lm.py` in a row, with many leaves and checkpoints, under load.

    hatch run dev:python tests-integration/stress_example.py --runs 20

Each must end with 0 within `--limit` seconds, and have saved its checkpoints. What they compile is
shared, so that most of the time goes into what may hang: steps beside saves, on 8 virtual devices.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stress_devices import busy

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "train_lm.py"
FLAGS = [
    *("--layers=8", "--d-model=32", "--heads=2", "--batch-size=8", "--sequence-length=32"),
    *("--mesh=data=4,model=2", "--steps=50", "--checkpoint-every=10", "--sample-bytes=20"),
]
KEPT = ["30", "40", "50"]  # of the checkpoints, the latest three


def run(folder: Path, data: Path, programs: Path, limit: float) -> None:
    """Makes one run.

    Raises:
      AssertionError: it fails, or leaves out a checkpoint.
      subprocess.TimeoutExpired: it hangs.
    """
    own = {name: value for name, value in os.environ.items() if name != "NPROC"}
    own |= {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(programs)}
    command = [sys.executable, str(PROGRAM), f"--out={folder}", f"--data={data}", *FLAGS]
    done = subprocess.run(
        command, env=own, timeout=limit, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    saved = sorted(path.name for path in (folder / "checkpoints").glob("[0-9]*"))
    assert saved == KEPT, saved


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep cores busy")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a run may take")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, busy(options.busy):
        world = Path(name)
        (world / "data").mkdir()
        for i in range(20):
            lines = "".join(f"def f{i}_{j}(x):\n    return {j} * x\n" for j in range(50))
            (world / "data" / f"{i:02}.py").write_text(lines)
        for i in range(1, options.runs + 1):
            start = time.perf_counter()
            run(world / f"run{i}", world / "data", world / "programs", options.limit)
            seconds = time.perf_counter() - start
            print(f"run {i}/{options.runs}: ended with 0 after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
