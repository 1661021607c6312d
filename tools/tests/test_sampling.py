"""The cases of a test marked `sample`: some by default, always the same."""

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


def test_some_cases_run_by_default(folder: Path) -> None:
    gate = collected(folder, "not slow")
    assert sorted(case.split("[")[0].split("::")[1] for case in gate) == [
        *("test_few", "test_few", "test_many", "test_many", "test_many", "test_one")
    ]
