"""The cases of a test marked `sample`: some by default, always the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.sample(3)
@pytest.mark.parametrize("a", range(20))
def test_many(a): ...

@pytest.mark.sample(3)
@pytest.mark.parametrize("a", range(2))
def test_few(a): ...

def test_one(): ...
"""


def test_some_cases_run_by_default(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_cases.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sample(n)\n    slow\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow"]
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they import JAX
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    names = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
    assert sorted(name.split("[")[0] for name in names) == [
        *("test_few", "test_few", "test_many", "test_many", "test_many", "test_one")
    ]
