"""The recipes run as they are: without arguments, on what devices there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
IN_THE_GATE = ("train_linen",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=() if path.stem in IN_THE_GATE else pytest.mark.slow)
        for path in sorted(RECIPES.glob("*.py"))
    ],
)
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
    assert "compiled once" in done.stdout
    assert "resumed on 4 " in done.stdout  # of 8 virtual devices
    if name == "train_nnx":
        *_, pretrained, _, restored, tuned = done.stdout.splitlines()
        assert float(pretrained.split()[2]) < 1.0
        assert restored.startswith("restored at step 120: ")
        before, after = float(tuned.split()[2]), float(tuned.split()[4].rstrip(","))
        assert after < before / 2


def test_every_example_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    for path in (*RECIPES.glob("*.py"), *(ROOT / "examples" / "adapters").glob("*.py")):
        assert f"{{literalinclude}} ../{path.relative_to(ROOT)}\n" in page


def test_every_recipe_says_what_to_install() -> None:
    for path in RECIPES.glob("*.py"):
        head = path.read_text().split('"""')[1]
        assert "\n    python -m pip install " in head
        assert f"\n    python examples/recipes/{path.name}\n" in head
