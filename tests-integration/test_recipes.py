"""The recipes run as they are, on what devices there are; so does the example of the triples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
IN_THE_GATE = ("train_dict",)


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=() if path.stem in IN_THE_GATE else pytest.mark.slow)
        for path in sorted(RECIPES.glob("*.py"))
    ],
)
def test_a_recipe_runs(name: str) -> None:
    done = run(RECIPES / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert "compiled once" in done.stdout
    assert "resumed on 4 " in done.stdout  # of 8 virtual devices
    if name == "train_nnx":
        *_, pretrained, _, restored, tuned = done.stdout.splitlines()
        assert float(pretrained.split()[2]) < 1.0
        assert restored.startswith("restored at step 120: ")
        before, after = float(tuned.split()[2]), float(tuned.split()[4].rstrip(","))
        assert after < before / 2


@pytest.mark.slow
def test_four_ways_from_the_triples_have_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    done = run(ROOT / "examples" / "migrate_from_triples.py", "--steps", "20", "--stop", "7")
    assert done.returncode == 0, done.stderr
    *_, differ, shards, verdict = done.stdout.splitlines()
    assert verdict == "the losses agree"
    differences = list(map(float, differ.removeprefix("differ").split()))
    assert len(differences) == 4
    assert differences[:2] == [0, 0]
    assert max(differences) < 1e-5
    of_adam = r"one device of 8 holds \(8, 2\) of the \(8, 16\) entries of Adam's m"
    assert re.fullmatch(of_adam, shards)


def test_every_example_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    for path in (*RECIPES.glob("*.py"), *(ROOT / "examples" / "adapters").glob("*.py")):
        assert f"{{literalinclude}} ../{path.relative_to(ROOT)}\n" in page


def test_every_recipe_says_what_to_install() -> None:
    for path in RECIPES.glob("*.py"):
        head = path.read_text().split('"""')[1]
        assert "\n    python -m pip install " in head
        assert f"\n    python examples/recipes/{path.name}\n" in head
