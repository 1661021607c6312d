"""Rehearses the release of every package: published one by one, each installed by its name.

A package goes to a local index only after those it requires, as on the day of the release. Nothing
of this repository is on PyPI yet, so a package released too early does not install.
"""

from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

from isolation import Uv, installed_versions, make_venv, probe, write_index
from workspace import Package, names


def release_order(packages: Mapping[str, Package]) -> list[str]:
    """Returns the packages, each after those it requires; extras may follow later.

    Raises:
        graphlib.CycleError: Packages require each other.
    """
    arrows = {
        name: names(package.requirements) & packages.keys() for name, package in packages.items()
    }
    return list(TopologicalSorter(arrows).static_order())


def rehearse(
    packages: Mapping[str, Package], *, uv: Uv, dist: Path, work: Path, python: str
) -> Iterator[str]:
    """Publishes every package to a local index; yields a line for each step that succeeded.

    Args:
        packages: The workspace.
        uv: The builder and installer.
        dist: A new folder, in which the sdists and wheels are left.
        work: An empty folder outside the checkout.
        python: The interpreter of the environments, as `uv venv --python` takes it.

    Raises:
        CheckError: A package does not build, install by its name, or import.
    """
    index = work / "index"
    for name in release_order(packages):
        package = packages[name]
        uv("build", "--quiet", "--out-dir", dist, package.folder)
        write_index(dist, index)
        environment = make_venv(uv, python, work / name)
        _install(uv, environment, index, name)
        interpreter = probe(package, environment)
        yield f"{name} {package.version} published, installed by name on Python {interpreter}"
    environment = make_venv(uv, python, work / "all")
    _install(uv, environment, index, *packages)
    for package in packages.values():
        probe(package, environment)
    uv("pip", "check", "--quiet", "--python", environment)
    yield f"all in one environment: {len(installed_versions(uv, environment))} distributions agree"


def _install(uv: Uv, environment: Path, index: Path, *distributions: str) -> None:
    refresh = [f"--refresh-package={page.name}" for page in index.iterdir()]
    where = ("--python", environment, "--index", index.resolve().as_uri())
    uv("pip", "install", "--quiet", *where, *refresh, *distributions)
