"""Fixtures for the tests of the tools: importable tools, and generated workspaces."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

# Make the tools importable as they import each other.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "bench")]

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
requires-python = ">=3.11"
dependencies = {dependencies}

[project.optional-dependencies]
{extras}
"""
_INIT = '''\
"""A package."""

__all__ = ["answer"]

answer = 42
'''


@pytest.fixture
def make_package(tmp_path: Path) -> Callable[..., Path]:
    """Gives a function that writes `packages/<name>` and returns that folder."""

    def make(
        name: str,
        dependencies: Sequence[str] = (),
        *,
        extras: Mapping[str, Sequence[str]] | None = None,
        version: str = "0.1.0",
        released: str = "unreleased",
        files: Mapping[str, str] | None = None,
    ) -> Path:
        module = name.replace("-", "_")
        lines = [f"{extra} = {json.dumps(list(r))}" for extra, r in (extras or {}).items()]
        content = {
            "pyproject.toml": _PYPROJECT.format(
                name=name,
                version=version,
                dependencies=json.dumps(list(dependencies)),
                extras="\n".join(lines),
            ),
            "CHANGELOG.md": f"# Changelog\n\n## {version} - {released}\n\n## 0.0.1 - 2020-01-01\n",
            f"src/{module}/__init__.py": _INIT,
            **(files or {}),
        }
        folder = tmp_path / "packages" / name
        for path, text in content.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        return folder

    return make
