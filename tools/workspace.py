"""The packages of this repository, as their `pyproject.toml` files describe them."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Package:
    """One distribution under `packages/`."""

    name: str
    folder: Path
    version: str
    requirements: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]

    @property
    def import_name(self) -> str:
        """The module that the distribution installs."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder of that module."""
        return self.folder / "src" / self.import_name

    def all_requirements(self) -> tuple[Requirement, ...]:
        """What it requires, its extras included."""
        return self.requirements + tuple(r for extra in self.extras.values() for r in extra)


def read_packages(root: Path = ROOT) -> dict[str, Package]:
    """Every package of the workspace at `root`, by name."""
    projects = sorted((root / "packages").glob("*/pyproject.toml"))
    return {path.parent.name: _read_package(path) for path in projects}


def siblings(package: Package, packages: Mapping[str, Package]) -> set[str]:
    """The packages of this repository that `package` or one of its extras names directly."""
    return (names(package.all_requirements()) & packages.keys()) - {package.name}


def closure(start: Iterable[str], arrows: Mapping[str, Iterable[str]]) -> set[str]:
    """Everything that can be reached from `start`, itself included.

    Examples:
        >>> sorted(closure(["a"], {"a": ["b"], "b": ["c"], "d": ["a"]}))
        ['a', 'b', 'c']
    """
    reached: set[str] = set()
    queue = list(start)
    while queue:
        node = queue.pop()
        if node not in reached:
            reached.add(node)
            queue.extend(arrows.get(node, ()))
    return reached


def names(requirements: Iterable[Requirement]) -> set[str]:
    """The distributions that `requirements` name."""
    return {canonicalize_name(requirement.name) for requirement in requirements}


def _read_package(pyproject: Path) -> Package:
    project: dict[str, Any] = tomllib.loads(pyproject.read_text())["project"]
    extras = project.get("optional-dependencies", {})
    return Package(
        name=project["name"],
        folder=pyproject.parent,
        version=project["version"],
        requirements=_parse(project.get("dependencies", ())),
        extras={extra: _parse(requirements) for extra, requirements in extras.items()},
    )


def _parse(requirements: Iterable[str]) -> tuple[Requirement, ...]:
    return tuple(Requirement(requirement) for requirement in requirements)
