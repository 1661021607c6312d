"""A trainer that is killed, as a process of its own."""

import signal
import subprocess
import sys
from pathlib import Path


def run_killed(test: str, folder: Path) -> Path:
    """Runs `killed(folder)` of a test's file in a process that kills itself; returns the folder."""
    path = Path(test)
    code = (
        "import jax; jax.config.update('jax_num_cpu_devices', 8); "
        f"import {path.stem} as test; test.killed({str(folder)!r})"
    )
    command = [sys.executable, "-c", code]
    died = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    return folder
