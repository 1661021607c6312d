"""The example that leaves the triples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[1] / "examples" / "migrate_from_triples.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_four_ways_to_the_same_losses() -> None:
    done = run("--steps", "20", "--stop", "7")
    assert done.returncode == 0, done.stderr
    *_, differ, shards, verdict = done.stdout.splitlines()
    assert verdict == "the losses agree"
    differences = list(map(float, differ.removeprefix("differ").split()))
    assert len(differences) == 4
    assert differences[:2] == [0, 0]
    assert max(differences) < 1e-5
    assert re.fullmatch(
        r"one device of 8 holds \(8, 2\) of the \(8, 16\) entries of Adam's m", shards
    )


def test_the_stop_is_within_the_run() -> None:
    done = run("--steps", "5", "--stop", "5")
    assert done.returncode == 2
    assert "--stop must be between 0 and --steps" in done.stderr
