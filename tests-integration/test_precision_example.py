"""The comparison of precisions: what the specification asks of the losses and the updates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "compare_precisions.py"


@pytest.mark.slow  # four to ten minutes
def test_every_method_learns_as_float32_does_but_casting(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "runs.json").read_text())
    runs, ratchets = found["runs"], found["ratchet"]
    exact = runs.pop("float32")
    largest = max(max(run["largest"][20:]) for run in exact)
    for name, own in runs.items():
        pairs = zip(own, exact, strict=True)
        mean = np.mean([run["held_out"] - of["held_out"] for run, of in pairs])
        most = max(max(run["largest"][20:]) for run in own)
        if name == "bfloat16, cast":
            assert mean >= 0.04
        elif name == "nearest 8 bits":
            assert most > 100 * largest
        else:
            assert mean <= 0.01, name
            assert most <= 2 * largest, name
    end = ratchets["float32"][-1]
    assert ratchets["8 bits"][-1] == pytest.approx(end, rel=0.05)
    assert ratchets["bfloat16"][-1] == pytest.approx(end, rel=0.05)
    assert ratchets["8 bits, nearest"][-1] > 100 * end
    assert (tmp_path / "precision.png").read_bytes().startswith(b"\x89PNG")
