"""More programs than XLA's CPU client runs at once must not hang: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "stress_devices.py"
# With NPROC, the CPU client has more threads than a user's has; see `conftest.py`.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "NPROC"}


def stress(*flags: str) -> str:
    command = [sys.executable, str(PROGRAM), *flags]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_digests_and_restores_during_steps() -> None:
    assert "round 20/20" in stress("--rounds=20", "--restores=1", "--busy=1")


@pytest.mark.slow
def test_digests_and_restores_during_steps_for_long() -> None:
    assert "round 2000/2000" in stress("--rounds=2000", "--restores=20", "--busy=2")
