"""The recipes run as they are, on what devices there are; so does the example of the triples."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
DEVICES = "--xla_force_host_platform_device_count=8"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_recipe_of_a_dict_runs_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", DEVICES)  # as this process has them
    runpy.run_path(str(RECIPES / "train_dict.py"), run_name="__main__")
    assert "resumed on 4 of 8 devices\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
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
    monkeypatch.setenv("XLA_FLAGS", DEVICES)
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
