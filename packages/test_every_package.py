"""What holds for each installed package: its imports, its exports, what its README prints."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

FOLDERS = {
    path.parent.name.replace("-", "_"): path.parent
    for path in sorted(Path(__file__).parent.glob("*/pyproject.toml"))
}
PACKAGES = [name for name in FOLDERS if importlib.util.find_spec(name)]
MODULES = [
    name if path.stem == "__init__" else f"{name}.{path.stem}"
    for name in PACKAGES
    for path in sorted((FOLDERS[name] / "src" / name).glob("*.py"))
    if path.stem == "__init__" or not path.stem.startswith(("_", "extend"))
]
ERRORS = [name for name in MODULES if name.endswith(".errors")]
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.M | re.S)
README = {name: PYTHON.findall((FOLDERS[name] / "README.md").read_text()) for name in PACKAGES}
NAMES: dict[str, dict[str, Any]] = {name: {"__name__": "readme"} for name in PACKAGES}
RAN: Counter[str] = Counter()  # programs of each README

IMPORT = """
import importlib, json, sys
theirs, ours = (names.split() for names in sys.argv[1:])
for name in theirs:
    importlib.import_module(name)
new = {}
for name in ours:
    before = set(sys.modules)
    importlib.import_module(name)
    new[name] = sorted({module.partition(".")[0] for module in set(sys.modules) - before})
from jax._src import xla_bridge
print(json.dumps([new, xla_bridge.backends_are_initialized(), sorted(sys.stdlib_module_names)]))
"""


def declared(name: str) -> set[str]:
    """The names in what a package and its siblings require, without extras."""
    found = {name}
    for requirement in importlib.metadata.requires(name.replace("_", "-")) or ():
        if "extra ==" not in requirement:
            other = re.split(r"[^\w-]", requirement)[0].replace("-", "_")
            found |= declared(other) if other in FOLDERS else {other}
    return found


def in_dashes(name: str) -> str:
    """A name for `-k`, as the distribution has it."""
    return name.replace("_", "-")


def test_importing_brings_what_is_declared_and_starts_no_device() -> None:
    heavy = {"flax": "flax.nnx", "jax": "jax", "optax": "optax.contrib"}
    theirs = {heavy[name] for package in PACKAGES for name in declared(package) & heavy.keys()}
    quiet = [f"error::UserWarning:{package}" for package in PACKAGES]
    command = [sys.executable, *(part for filter_ in quiet for part in ("-W", filter_))]
    done = subprocess.run(
        [*command, "-c", IMPORT, " ".join(sorted(theirs)), " ".join(PACKAGES)],
        check=True,
        capture_output=True,
        text=True,
    )
    new, is_started, standard = json.loads(done.stdout.splitlines()[-1])
    allowed = {"jaxlib", "numpy", *standard}
    assert {name: set(new[name]) - declared(name) - allowed for name in PACKAGES} == {
        name: set() for name in PACKAGES
    }
    assert not is_started


def is_own(value: Any, name: str) -> bool:
    """Whether a value is a function or class of the package of the module `name`."""
    module = str(getattr(value, "__module__", ""))
    is_ours = module.partition(".")[0] == name.partition(".")[0]
    return is_ours and (inspect.isclass(value) or inspect.isfunction(value))


@pytest.mark.parametrize("name", MODULES, ids=in_dashes)
def test_all_is_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    found = {n for n, value in vars(module).items() if n[0] != "_" and is_own(value, name)}
    if "." in name:  # without what it imports
        found = {n for n in found if getattr(module, n).__module__ == name}
    exported = list(module.__all__)
    assert len(exported) == len(set(exported))
    assert found <= set(exported) <= set(dir(module))


@pytest.mark.parametrize("name", MODULES, ids=in_dashes)
def test_what_is_public_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    values = {n: getattr(module, n) for n in module.__all__}
    public = {n: value for n, value in values.items() if is_own(value, name)}
    for owner, value in list(public.items()):
        for n, member in vars(value).items() if inspect.isclass(value) else ():
            function = member.fget if isinstance(member, property) else member
            if n[0] != "_" and inspect.isfunction(function) and is_own(function, name):
                public[f"{owner}.{n}"] = function
    assert module.__doc__
    assert not [n for n, value in public.items() if not value.__doc__]  # inherited does not count


@pytest.mark.parametrize("name", ERRORS, ids=in_dashes)
def test_errors_have_one_root(name: str) -> None:
    module = importlib.import_module(name)
    errors = [getattr(module, n) for n in module.__all__]
    families = [set(error.__mro__) for error in errors if not issubclass(error, Warning)]
    assert [root for root in set.intersection(*families) if is_own(root, root.__module__)]


@pytest.mark.parametrize("name", PACKAGES, ids=in_dashes)
def test_types_are_shipped_and_the_version_is_one(name: str) -> None:
    assert files(name).joinpath("py.typed").is_file()
    version = importlib.metadata.version(name.replace("_", "-"))
    assert importlib.import_module(name).__version__ == version
    changes = (FOLDERS[name] / "CHANGELOG.md").read_text()
    newest = re.search(r"^## .*$", changes, re.MULTILINE)
    assert newest
    assert re.fullmatch(rf"## {re.escape(version)} - (unreleased|\d{{4}}-\d\d-\d\d)", newest[0])


@pytest.mark.parametrize(
    ("name", "program"),
    [(name, number) for name in PACKAGES for number in range(1, 1 + (len(README[name]) or 1))],
    ids=lambda value: in_dashes(str(value)),
)
def test_the_readme_runs_and_prints_what_it_shows(
    name: str, program: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program may use what those above it define: alone, it runs them first."""
    while RAN[name] < program:
        code, output = README[name][RAN[name]]
        RAN[name] += 1
        exec(compile(code, f"README.md of {name}, program {RAN[name]}", "exec"), NAMES[name])
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == output.splitlines(), f"program {RAN[name]}"
