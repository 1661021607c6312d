"""Tests the wheel of a single package in an empty environment.

Twice: with only its declared dependencies, where it must be importable; then with its `test` extra,
  where a copy of its tests outside the checkout must pass: all of them, or those marked `contract`,
  which cover what another environment can break (imports, public API, the programs of the README, a
  few steps of everything). The packages of this repository come from a local index of freshly built
wheels, everything else from PyPI.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from workspace import Package, closure, names

# Variables that would leak the checkout or the caller's configuration into the environment.
_UNWANTED = {
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "UV_RESOLUTION"),
    # JAX does not write cache files atomically, and packages are tested concurrently.
    "JAX_COMPILATION_CACHE_DIR",
}
# The pytest options of the root that apply everywhere.
_PYTEST_OPTIONS = ("addopts", "doctest_optionflags", "filterwarnings", "markers", "xfail_strict")
_REPORTED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex")

# Runs in the environment; prints one JSON object.
_PROBE = """
import importlib, importlib.metadata, json, platform, sys
module, distribution = sys.argv[1:]
loaded = importlib.import_module(module)
print(json.dumps({
    "file": loaded.__file__,
    "version": importlib.metadata.version(distribution),
    "missing": [n for n in getattr(loaded, "__all__", ["__all__"]) if not hasattr(loaded, n)],
    "python": platform.python_version(),
}))
"""


class CheckError(Exception):
    """An obstacle to a release; the message says what was expected, found, and what to do."""


@dataclass(frozen=True)
class Uv:
    """The `uv` program."""

    program: str

    @classmethod
    def find(cls) -> "Uv":
        """Looks next to the running Python, then in `HATCH_UV`, then on the path.

        Raises:
            CheckError: `uv` was not found.
        """
        sibling = shutil.which("uv", path=str(Path(sys.executable).parent))
        program = sibling or os.environ.get("HATCH_UV") or shutil.which("uv")
        if not program:
            raise CheckError(
                "no `uv` found: `python -m pip install uv`, or run this by `hatch run`"
            )
        return cls(program)

    def __call__(self, *arguments: str | Path) -> str:
        """Runs it; returns its output.

        Raises:
            CheckError: It failed.
        """
        return run([self.program, *map(str, arguments)])


@dataclass(frozen=True)
class Trial:
    """The environment in which a package is tested.

    Attributes:
        python: A version or an interpreter, as `uv venv --python` takes it.
        resolution: `highest`, or `lowest-direct` for the oldest versions that it claims.
        markers: Which tests run, as pytest's `-m` takes it.
    """

    python: str
    resolution: str
    markers: str = "not slow"


def try_package(package: Package, trial: Trial, *, uv: Uv, wheels: Path, work: Path) -> str:
    """Installs and tests one package.

    Args:
        package: What to try.
        trial: Where.
        uv: The installer.
        wheels: A folder with the wheels of `package` and its siblings.
        work: An empty folder outside the checkout.

    Returns:
        One line: the interpreter, the versions, how the tests ended.

    Raises:
        CheckError: It does not install, import or pass.
    """
    python = make_venv(uv, trial.python, work / "venv")
    index = write_index(wheels, work / "index")
    ours = {page.name for page in index.iterdir()}
    for extras in (set[str](), reached_extras(package)):
        promised = claims(package, extras, ours)
        install(uv, python, index, trial, package, extras=extras, also=promised)
        interpreter = probe(package, python)
    installed = installed_versions(uv, python)
    if trial.resolution == "lowest-direct":
        check_floors(package, promised, installed)
    verdict = run_tests(package, python, work, trial)
    versions = ", ".join(f"{name} {installed[name]}" for name in _REPORTED if name in installed)
    return f"Python {interpreter}, {trial.resolution}: {versions}; {verdict}"


def make_venv(uv: Uv, python: str, folder: Path) -> Path:
    """Creates an empty virtual environment; returns its interpreter."""
    uv("venv", "--quiet", "--no-project", "--python", python, folder)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def write_index(wheels: Path, folder: Path) -> Path:
    """Writes a package index of `wheels`.

    An index before PyPI hides packages of the same names on PyPI; a folder of wheels
    (`--find-links`) would compete with them.
    """
    for wheel in sorted(wheels.glob("*.whl")):
        page = folder / canonicalize_name(wheel.name.partition("-")[0]) / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(f'<a href="{wheel.resolve().as_uri()}">{wheel.name}</a>\n')
    return folder


def install(
    uv: Uv,
    python: Path,
    index: Path,
    trial: Trial,
    package: Package,
    *,
    extras: Iterable[str],
    also: Iterable[Requirement],
) -> None:
    """Installs `package` with `extras`.

    uv treats only requirements on the command line as direct: naming the package's own requirements
    in `also` makes `lowest-direct` pick their oldest versions, while those of the `test` extra stay
    at the newest compatible ones.
    """
    target = f"{package.name}[{','.join(sorted(extras))}]=={package.version}"
    refresh = [f"--refresh-package={page.name}" for page in index.iterdir()]
    uv(
        *("pip", "install", "--python", python, "--upgrade", "--resolution", trial.resolution),
        *("--index", index.resolve().as_uri(), *refresh, target, *map(str, also)),
    )


def reached_extras(package: Package, start: str = "test") -> set[str]:
    """`start` and the package's own extras that it names (`test = ["opt-x[orbax]", ...]`)."""
    arrows = {
        extra: {name for r in requirements if names([r]) == {package.name} for name in r.extras}
        for extra, requirements in package.extras.items()
    }
    return closure({start} & arrows.keys(), arrows)


def claims(package: Package, extras: Iterable[str], ours: Set[str]) -> list[Requirement]:
    """The requirements whose range promises users something about other people's packages.

    Args:
        package: Whose requirements.
        extras: Which of its extras count; tools for tests promise nothing.
        ours: This repository's packages, of which there is only the version just built.
    """
    promised = [package.extras[extra] for extra in sorted(extras) if extra != "test"]
    everything = [*package.requirements, *(r for group in promised for r in group)]
    return [r for r in everything if canonicalize_name(r.name) not in ours]


def check_floors(
    package: Package, claimed: Iterable[Requirement], installed: Mapping[str, str]
) -> None:
    """Checks that the oldest versions claimed are the ones installed.

    Raises:
        CheckError: Something newer is installed: the claim cannot be true, or not be tested.
    """
    for requirement in claimed:
        floors = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
        name = canonicalize_name(requirement.name)
        if not floors or requirement.marker is not None:
            continue
        if Version(installed[name]) != max(floors):
            raise CheckError(
                f"{package.name} claims `{requirement}`: expected {name} {max(floors)} in the "
                f"oldest environment, found {installed[name]}. Another requirement or a missing "
                "release rules the older one out; raise the claim to what is tested."
            )


def probe(package: Package, python: Path) -> str:
    """Imports the package in its environment; returns the version of the interpreter.

    Raises:
        CheckError: It does not import, comes from elsewhere, or exports what it does not have.
    """
    output = run([str(python), "-I", "-c", _PROBE, package.import_name, package.name])
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    home = python.parents[1].resolve()
    if not Path(found["file"]).resolve().is_relative_to(home):
        raise CheckError(
            f"{package.name}: expected `{package.import_name}` from {home}, found {found['file']}. "
            "Something puts the checkout on the path."
        )
    if found["version"] != package.version:
        raise CheckError(
            f"{package.name}: expected version {package.version} of pyproject.toml, found "
            f"{found['version']} installed."
        )
    if found["missing"]:
        raise CheckError(
            f"{package.name}: `{package.import_name}` lacks {', '.join(found['missing'])}. "
            "Define `__all__`, and every name in it."
        )
    return str(found["python"])


def installed_versions(uv: Uv, python: Path) -> dict[str, str]:
    """The version of every distribution in an environment."""
    listing = json.loads(uv("pip", "list", "--quiet", "--python", python, "--format", "json"))
    return {canonicalize_name(entry["name"]): entry["version"] for entry in listing}


def run_tests(package: Package, python: Path, work: Path, trial: Trial) -> str:
    """Runs a copy of the package's tests in `work`; returns the last line of pytest's output.

    Warnings are errors with the newest versions, as in the checkout. Old releases of other
    people's packages warn about each other, and nothing here can mend that.

    Args:
        package: Whose tests.
        python: The interpreter of the environment.
        work: A folder outside the checkout.
        trial: Which tests, and of which environment `python` is.

    Raises:
        CheckError: A test fails, or none has the markers.
    """
    if not any(package.folder.glob("tests/**/test_*.py")):
        return "no tests yet"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package.folder / "tests", work / "tests", ignore=ignore)
    root = package.folder.parents[1]
    if (root / "conftest.py").is_file():
        shutil.copy(root / "conftest.py", work)
    strict = trial.resolution == "highest"
    (work / "pytest.ini").write_text(pytest_ini(root / "pyproject.toml", strict=strict))
    command = [str(python), "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return run([*command, "-m", trial.markers, "tests"], cwd=work).splitlines()[-1]


def pytest_ini(pyproject: Path, *, strict: bool) -> str:
    """A `pytest.ini` for tests alone, from the options of the root `pyproject.toml`."""
    options = tomllib.loads(pyproject.read_text())["tool"]["pytest"]["ini_options"]
    if not strict:
        options.pop("filterwarnings", None)
    lines = ["[pytest]"]
    for name in _PYTEST_OPTIONS:
        if name in options:
            value = options[name]
            values = value if isinstance(value, list) else [str(value).lower()]
            if (
                name == "addopts"
            ):  # a single shell line, and without doctests, as only the tests are copied
                values = [shlex.quote(v) for v in values if v != "--doctest-modules"]
            lines += [f"{name} =", *(f"    {v}" for v in values)]
    return "\n".join(lines) + "\n"


def run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """Runs `command` in a clean environment; returns its output.

    Raises:
        CheckError: It failed.
    """
    env = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    done = subprocess.run(command, cwd=cwd, env=env, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(
            f"{' '.join(command)}\nended with code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout
