"""The cases of a test marked `sample`: some in the gate, always the same, and all at night."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """\
import pytest


@pytest.mark.sample(3)
@pytest.mark.parametrize("b", "xy")
@pytest.mark.parametrize("a", range(10))
def test_many(a, b):
    pass


@pytest.mark.sample(3)
@pytest.mark.parametrize("a", range(2))
def test_few(a):
    pass


def test_one():
    pass
"""
INI = "[pytest]\nmarkers =\n    sample(n)\n    slow\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_cases.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(INI)
    return tmp_path


def collected(folder: Path, markers: str, *arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", markers, *arguments]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they import JAX
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_the_gate_has_some_cases_and_the_night_all(folder: Path) -> None:
    gate, rest, everything = (collected(folder, m) for m in ("not slow", "slow", ""))
    assert len(everything) == 23
    assert gate | rest == everything
    assert not gate & rest
    assert sorted(case.split("[")[0].split("::")[1] for case in gate) == [
        *("test_few", "test_few", "test_many", "test_many", "test_many", "test_one")
    ]


def test_the_cases_are_the_same_from_another_folder(folder: Path) -> None:
    below = folder / "below"
    below.mkdir()
    shutil.move(folder / "test_cases.py", below)
    moved = {case.split("::")[1] for case in collected(folder, "not slow")}
    shutil.move(below / "test_cases.py", folder)
    assert moved == {case.split("::")[1] for case in collected(folder, "not slow")}
