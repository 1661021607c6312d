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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "restores", "busy"), [(20, 1, 1), (2000, 20, 2)], ids=["short", "long"]
)
def test_digests_and_restores_during_steps(rounds: int, restores: int, busy: int) -> None:
    flags = (f"--rounds={rounds}", f"--restores={restores}", f"--busy={busy}")
    command = [sys.executable, str(PROGRAM), *flags]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"round {rounds}/{rounds}" in done.stdout
