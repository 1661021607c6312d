"""More programs than XLA's CPU client runs at once must not hang: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "stress_devices.py"
# With NPROC, the CPU client has more threads than a user's has; see `conftest.py`.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "NPROC"}


@pytest.mark.slow
def test_digests_and_restores_during_steps() -> None:
    command = [sys.executable, str(PROGRAM), "--rounds=2000", "--restores=20", "--busy=2"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2000/2000" in done.stdout
