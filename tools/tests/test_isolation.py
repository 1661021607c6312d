"""The parts of the isolated trial that need no environment of their own."""

import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from isolation import (
    CheckError,
    Uv,
    check_floors,
    claims,
    probe,
    pytest_ini,
    reached_extras,
    run,
    write_index,
)
from packaging.requirements import Requirement
from workspace import ROOT, read_packages

OURS = {"opt-a", "opt-b"}
EXTRAS = {
    "orbax": ["orbax-checkpoint>=0.11"],
    "unused": ["numba>=1"],
    "test": ["opt-b[orbax]", "chex>=0.1.90"],
}


def test_claims_are_other_peoples_packages_without_tools_for_tests(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-b", ["opt-a>=0.1,<0.2", "jax>=0.8.0"], extras=EXTRAS)
    package = read_packages(tmp_path)["opt-b"]
    extras = reached_extras(package)
    assert extras == {"test", "orbax"}
    assert list(map(str, claims(package, (), OURS))) == ["jax>=0.8.0"]
    assert list(map(str, claims(package, extras, OURS))) == [
        "jax>=0.8.0",
        "orbax-checkpoint>=0.11",
    ]


def test_a_package_without_a_test_extra_reaches_none(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-b")
    assert reached_extras(read_packages(tmp_path)["opt-b"]) == set()


@pytest.mark.parametrize("requirement", ["jax>=0.8", "jax>=0.8.0,<0.20", "jax", "jax<2"])
def test_the_oldest_version_claimed_is_accepted(
    requirement: str, tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-b")
    package = read_packages(tmp_path)["opt-b"]
    check_floors(package, [Requirement(requirement)], {"jax": "0.8.0"})


def test_a_newer_version_than_claimed_is_an_error(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-b")
    package = read_packages(tmp_path)["opt-b"]
    with pytest.raises(CheckError, match=r"opt-b claims `jax>=0\.8`: expected jax 0\.8 .* 0\.8\.1"):
        check_floors(package, [Requirement("jax>=0.8")], {"jax": "0.8.1"})


def test_the_index_has_a_page_for_each_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "opt_legacy_stax-0.1.0-py3-none-any.whl"
    wheel.touch()
    page = write_index(tmp_path, tmp_path / "index") / "opt-legacy-stax" / "index.html"
    assert page.read_text() == f'<a href="{wheel.as_uri()}">{wheel.name}</a>\n'


def test_pytest_keeps_the_options_of_the_root() -> None:
    text = pytest_ini(ROOT / "pyproject.toml", strict=True)
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert text.startswith("[pytest]\naddopts =\n    --import-mode=importlib\n")
    assert "doctest-modules" not in text
    assert "\n    '-m=not slow'\n" in text
    assert "xfail_strict =\n    true\n" in text
    for name in ("filterwarnings", "markers"):
        assert all(f"\n    {value}\n" in text for value in options[name])


def test_with_the_oldest_versions_warnings_are_not_errors() -> None:
    text = pytest_ini(ROOT / "pyproject.toml", strict=False)
    assert "filterwarnings" not in text
    assert "xfail_strict" in text


def test_a_package_from_the_checkout_is_an_error(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    # pytest itself stands for a package that comes from elsewhere than the environment asked for.
    make_package("pytest")
    package = read_packages(tmp_path)["pytest"]
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(CheckError, match="puts the checkout on the path"):
        probe(package, python)


def test_what_would_let_the_checkout_in_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/checkout")
    monkeypatch.setenv("HOME", "/home/me")
    asked = "import os; print(os.environ.get('PYTHONPATH'), os.environ['HOME'])"
    assert run([sys.executable, "-c", asked]) == "None /home/me\n"


def test_a_failing_command_tells_what_it_printed() -> None:
    with pytest.raises(CheckError, match=r"(?s)ended with code 3:.*oh no"):
        run([sys.executable, "-c", "import sys; print('oh no'); sys.exit(3)"])


def test_uv_is_found_next_to_python_then_by_hatch_then_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("beside", "path"):
        program = tmp_path / folder / "uv"
        program.parent.mkdir()
        program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=os.pathsep)
    monkeypatch.setenv("HATCH_UV", "/hatch/uv")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert Uv.find().program == str(tmp_path / "beside" / "uv")
    (tmp_path / "beside" / "uv").unlink()
    assert Uv.find().program == "/hatch/uv"
    monkeypatch.delenv("HATCH_UV")
    assert Uv.find().program == str(tmp_path / "path" / "uv")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckError, match="no `uv` found"):
        Uv.find()
