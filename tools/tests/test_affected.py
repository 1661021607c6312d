"""Which packages a diff touches."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from affected import Affected, affected, changed_files, dependants, github_output, main
from workspace import Package, read_packages


@pytest.fixture
def packages(tmp_path: Path, make_package: Callable[..., Path]) -> Mapping[str, Package]:
    """opt-top needs opt-middle needs opt-base; opt-side needs opt-base for an extra."""
    make_package("opt-base")
    make_package("opt-middle", ["opt-base>=0.1,<0.2"])
    make_package("opt-top", ["opt-middle>=0.1,<0.2"])
    make_package("opt-side", extras={"base": ["opt-base"]})
    make_package("opt-alone")
    return read_packages(tmp_path)


def _git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, packages: Mapping[str, Package]) -> Path:
    """The packages, committed on `main`, with `work` checked out."""
    _git(tmp_path, "init", "-b", "main")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "one")
    _git(tmp_path, "checkout", "-b", "work")
    return tmp_path


EVERYTHING = ("opt-alone", "opt-base", "opt-middle", "opt-side", "opt-top")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("packages/opt-alone/src/opt_alone/__init__.py", ("opt-alone",)),
        ("packages/opt-top/README.md", ("opt-top",)),
        ("packages/opt-middle/pyproject.toml", ("opt-middle", "opt-top")),
        ("packages/opt-base/tests/test_a.py", ("opt-base", "opt-middle", "opt-side", "opt-top")),
        ("docs/guide.md", ()),
        ("examples/train.py", ()),
        ("tests-integration/test_sharded.py", ()),
        ("README.md", ()),
        ("pyproject.toml", EVERYTHING),
        ("hatch.toml", EVERYTHING),
        ("tools/release.py", EVERYTHING),
        (".github/workflows/ci.yml", EVERYTHING),
        (".ci/run", EVERYTHING),
        ("tools/README.md", EVERYTHING),
        ("packages/opt-removed/pyproject.toml", EVERYTHING),
        ("something-new", EVERYTHING),
    ],
)
def test_one_changed_file(
    path: str, expected: tuple[str, ...], packages: Mapping[str, Package]
) -> None:
    assert affected([path], packages) == Affected(expected, integration=True)


def test_no_change_asks_for_nothing(packages: Mapping[str, Package]) -> None:
    assert affected([], packages) == Affected((), integration=False)


def test_dependants_are_the_reverse_of_requirements(packages: Mapping[str, Package]) -> None:
    assert dependants(packages)["opt-base"] == {"opt-middle", "opt-side"}
    assert dependants(packages)["opt-top"] == set()


def test_changes_are_those_since_the_fork_committed_or_not(repository: Path) -> None:
    _git(repository, "checkout", "main")
    (repository / "only-on-main").write_text("x")
    _git(repository, "add", ".")
    _git(repository, "commit", "-m", "two")
    _git(repository, "checkout", "work")
    moved = repository / "packages/opt-alone/CHANGELOG.md"
    moved.rename(repository / "packages/opt-top/MOVED.md")
    _git(repository, "add", ".")
    _git(repository, "commit", "-m", "three")
    (repository / "packages/opt-side/CHANGELOG.md").write_text("edited")
    assert changed_files(repository, "main") == [
        "packages/opt-alone/CHANGELOG.md",
        "packages/opt-side/CHANGELOG.md",
        "packages/opt-top/MOVED.md",
    ]


def test_main_prints_json_and_writes_the_outputs_of_a_job(
    repository: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    output = tmp_path / "output"
    output.write_text("before=1\n")
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    (repository / "packages/opt-middle/CHANGELOG.md").write_text("edited")
    assert main(["--base", "main", "--json", "--github-output"], root=repository) == 0
    assert json.loads(capsys.readouterr().out) == ["opt-middle", "opt-top"]
    assert output.read_text() == (
        'before=1\npackages=["opt-middle", "opt-top"]\nintegration=true\n'
    )


def test_main_prints_lines(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--all"], root=repository) == 0
    assert capsys.readouterr().out.split() == list(EVERYTHING)


def test_an_unknown_base_is_an_error_that_says_what_to_do(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], root=repository) == 2
    assert "no diff against 'origin/main'" in (error := capsys.readouterr().err)
    assert "name another --base" in error


def test_nothing_affected_is_an_empty_matrix() -> None:
    assert github_output(Affected((), integration=False)) == "packages=[]\nintegration=false\n"
