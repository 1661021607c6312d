"""A framework that depends on two of the packages: from wheels, in an empty environment."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORK = Path(__file__).parent / "downstream" / "savelab"
UV = Path(sys.executable).parent / "uv"
# What it may bring of the packages: the two that it names, and what these declare.
BROUGHT = {"opt-checkpoint", "opt-core", "opt-optax-bridge", "opt-partition"}
PROGRAM = """
import importlib.metadata, json, pathlib, savelab, sys
folder, until = sys.argv[1:]
trainer = savelab.Trainer(pathlib.Path(folder))
began, first = trainer.steps, trainer.loss()
trainer.run(int(until))
ours = {d.name for d in importlib.metadata.distributions() if d.name.startswith("opt-")}
print(json.dumps({
    "began": began, "steps": trainer.steps, "first": first, "loss": trainer.loss(),
    "ours": sorted(ours), "as_promised": trainer.is_as_promised(),
}))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    for name in sorted(BROUGHT):
        run(UV, "build", "--quiet", "--wheel", "--out-dir", out, ROOT / "packages" / name)
    return out


def run(*command: object) -> str:
    unwanted = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_framework_of_two_packages_trains_and_resumes(wheels: Path, tmp_path: Path) -> None:
    project = tomllib.loads((FRAMEWORK / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) == 2
    python = tmp_path / "venv" / "bin" / "python"
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    run(UV, "pip", "install", "--python", python, "--find-links", wheels, FRAMEWORK)

    def train(folder: str, until: int) -> dict[str, Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        printed = run(python, "-I", "-c", PROGRAM, tmp_path / folder, until)
        result: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return result

    straight = train("straight", 8)
    assert straight["began"] == 0
    assert straight["loss"] < straight["first"]
    train("interrupted", 4)
    resumed = train("interrupted", 8)
    assert (resumed["began"], resumed["steps"]) == (4, 8)
    assert resumed["loss"] == straight["loss"]
    assert set(resumed["ours"]) == BROUGHT
    assert resumed["as_promised"]
