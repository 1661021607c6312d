"""The recipes run as they are: without arguments, on what devices there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_a_recipe_runs(name: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(RECIPES / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if name == "nnx":
        *_, pretrained, restored, tuned = done.stdout.splitlines()
        assert float(pretrained.split()[2]) < 1.0
        assert restored.startswith("restored at step 120: ")
        before, after = float(tuned.split()[2]), float(tuned.split()[4].rstrip(","))
        assert after < before / 2
