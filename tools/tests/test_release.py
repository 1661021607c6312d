"""Versions, changelogs and tags, and the whole check on packages made of nothing."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from isolation import CheckError
from release import changed, check_changelog, check_tag, main
from workspace import Package, read_packages

TESTS = """\
import opt_b
import pytest


@pytest.mark.contract
def test_answer():
    assert opt_b.twice == 84


def test_slowly():
    assert opt_b.twice == 2 * 42
"""


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def commit(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("a") as file:
            file.write("\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "a change")


def _package(tmp_path: Path, changelog: str) -> Package:
    package = read_packages(tmp_path)["opt-a"]
    (package.folder / "CHANGELOG.md").write_text(changelog)
    return package


@pytest.mark.parametrize("when", ["unreleased", "2026-11-21"])
def test_the_top_heading_is_the_version(
    when: str, tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-a", version="1.2.3", released=when)
    assert check_changelog(read_packages(tmp_path)["opt-a"]) == when


@pytest.mark.parametrize(
    "heading",
    [
        "## 0.1.1 - unreleased",
        "## 0.1.0",
        "## 0.1.0 - soon",
        "## 0.1.0 - 2026-13-01",
        "## 0.1.0 - 20261121",
        "## [0.1.0] - unreleased",
        "no heading",
    ],
)
def test_any_other_heading_is_an_error(
    heading: str, tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-a")
    package = _package(tmp_path, f"# Changelog\n\n{heading}\n\ntext\n")
    with pytest.raises(
        CheckError, match=r"expected `## 0\.1\.0 - unreleased` or .* found"
    ) as error:
        check_changelog(package)
    assert f"found `{heading}`. Make it agree" in str(error.value)


def test_an_older_heading_does_not_count(tmp_path: Path, make_package: Callable[..., Path]) -> None:
    make_package("opt-a")
    package = _package(tmp_path, "## 0.2.0 - unreleased\n## 0.1.0 - 2020-01-01\n")
    with pytest.raises(CheckError, match=r"found `## 0\.2\.0 - unreleased`"):
        check_changelog(package)


def test_a_tag_names_a_dated_version(tmp_path: Path, make_package: Callable[..., Path]) -> None:
    make_package("opt-a", released="2026-11-21")
    check_tag(read_packages(tmp_path)["opt-a"], "opt-a-v0.1.0")


@pytest.mark.parametrize("tag", ["opt-a-v0.1.1", "opt-a-0.1.0", "v0.1.0", "opt-b-v0.1.0"])
def test_a_tag_of_another_version_is_an_error(
    tag: str, tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-a", released="2026-11-21")
    with pytest.raises(CheckError, match=rf"expected the tag `opt-a-v0\.1\.0` .* found `{tag}`"):
        check_tag(read_packages(tmp_path)["opt-a"], tag)


def test_a_tag_of_an_unreleased_version_is_an_error(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-a")
    with pytest.raises(CheckError, match="expected the day of the release"):
        check_tag(read_packages(tmp_path)["opt-a"], "opt-a-v0.1.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["version", "opt-x"], "error: no package `opt-x`; there are opt-a"),
        (["check"], "error: nothing to check"),
        (["check", "--tag", "opt-x-v1"], "error: no package `opt-x`"),
        (["check", "--tag", "opt-a-v0.1.0"], "found `unreleased`"),
        (["check", "--all", "--keep", str(Path(__file__).parent)], "expected an empty folder"),
    ],
)
def test_errors_end_the_command(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    make_package: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_package("opt-a")
    assert main(arguments, root=tmp_path) == 1
    assert message in capsys.readouterr().err


def test_version_prints_the_version(
    tmp_path: Path, make_package: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_package("opt-a", version="0.7.2")
    assert main(["version", "opt-a"], root=tmp_path) == 0
    assert capsys.readouterr().out == "0.7.2\n"


@pytest.fixture
def workspace(tmp_path: Path, make_package: Callable[..., Path]) -> Path:
    """opt-b, which requires its sibling opt-a and the oldest idna that it claims."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib", "--doctest-modules"]\n'
        'markers = ["contract", "slow"]\n'
    )
    make_package("opt-a")
    make_package(
        "opt-b",
        ["opt-a>=0.1,<0.2", "idna>=3.4"],
        extras={"test": ["pytest>=8"]},
        files={
            "src/opt_b/__init__.py": (
                "import opt_a\n__all__ = ['twice']\ntwice = 2 * opt_a.answer\n"
            ),
            "tests/test_twice.py": TESTS,
        },
    )
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["packages/opt-a/src/opt_a/__init__.py"], {"opt-a"}),
        (["packages/opt-a/tests/data.json", "packages/opt-b/pyproject.toml"], {"opt-a", "opt-b"}),
        (["packages/opt-a/README.md", "docs/index.md", "hatch.toml"], set()),
        (["packages/opt-ab/a.py"], set()),
    ],
)
def test_code_tests_and_declarations_of_a_package_change_it(
    paths: list[str], expected: set[str], tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-a")
    make_package("opt-b")
    packages = read_packages(tmp_path)
    git(tmp_path, "init", "-b", "main")
    commit(tmp_path)
    commit(tmp_path, "packages/opt-b/src/opt_b/before.py")
    git(tmp_path, "checkout", "-b", "topic")
    commit(tmp_path, *paths)
    assert changed(packages, "main") == expected
    git(tmp_path, "checkout", "main")
    commit(tmp_path, "notes.txt")
    git(tmp_path, "merge", "--no-ff", "topic")
    assert changed(packages, "main") == expected  # what the merge brought
    git(tmp_path, "mv", "packages/opt-a/src/opt_a/__init__.py", "packages/opt-b/src/opt_b/a.py")
    git(tmp_path, "commit", "-m", "moved")
    assert changed(packages, "main") == {"opt-a", "opt-b"}


def test_an_unknown_base_is_an_error(tmp_path: Path, make_package: Callable[..., Path]) -> None:
    make_package("opt-a")
    git(tmp_path, "init")
    commit(tmp_path)
    with pytest.raises(CheckError, match="name another --base"):
        changed(read_packages(tmp_path), "origin/main")


def test_a_package_is_built_installed_and_tested_alone(
    workspace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    arguments = ["check", "opt-b", "--resolution", "highest", "lowest-direct", "--keep", str(kept)]
    assert main([*arguments, "--tests", "oldest"], root=workspace) == 0
    oldest, newest = capfd.readouterr().out.splitlines()
    for line in oldest, newest:
        assert line.startswith("passed  opt-b 0.1.0 (")
    assert "lowest-direct: " in oldest  # the long one first
    assert "2 passed in" in oldest
    assert "highest: " in newest
    assert "1 passed, 1 deselected in" in newest
    assert sorted(path.name for path in (kept / "dist").glob("*.*")) == [
        ".gitignore",
        "opt_a-0.1.0-py3-none-any.whl",
        "opt_a-0.1.0.tar.gz",
        "opt_b-0.1.0-py3-none-any.whl",
        "opt_b-0.1.0.tar.gz",
    ]
    python = kept / "opt-b-lowest-direct" / "venv" / "bin" / "python"
    asked = "import idna, opt_b; print(idna.__version__, opt_b.__file__)"
    printed = subprocess.run([python, "-Ic", asked], capture_output=True, text=True, check=True)
    version, file = printed.stdout.split()
    assert version == "3.4"
    assert file.startswith(str(kept))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("tests/test_twice.py", "pytest.mark.contract", "pytest.mark.slow", "2 deselected"),
        ("tests/test_twice.py", "84", "85", "assert 84 == 85"),
        ("src/opt_b/__init__.py", "import opt_a", "import opt_a, pytest", "No module named 'pyt"),
        ("src/opt_b/__init__.py", "['twice']", "['thrice']", "`opt_b` lacks thrice"),
        ("CHANGELOG.md", "0.1.0", "0.2.0", "expected `## 0.1.0 - unreleased`"),
    ],
)
def test_what_is_wrong_with_a_package_fails_its_check(
    file: str,
    old: str,
    new: str,
    message: str,
    workspace: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = workspace / "packages/opt-b" / file
    path.write_text(path.read_text().replace(old, new))
    assert main(["check", "--all", "--jobs", "2", "--tests", "contract"], root=workspace) == 1
    captured = capfd.readouterr()
    assert "passed  opt-a 0.1.0" in captured.out
    assert "no tests yet" in captured.out
    assert "FAILED  opt-b 0.1.0" in captured.out
    assert message in captured.err


def test_packages_are_released_after_those_they_require(
    workspace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dist = tmp_path / "dist"
    assert main(["rehearse", "--out", str(dist)], root=workspace) == 0
    first, second, together = capfd.readouterr().out.splitlines()
    assert first.startswith("opt-a 0.1.0 published, installed by name on Python 3.")
    assert second.startswith("opt-b 0.1.0 published, installed by name on Python 3.")
    assert together == "all in one environment: 3 distributions agree"  # with idna
    assert main(["rehearse", "--out", str(dist)], root=workspace) == 1
    assert "expected a folder without wheels" in capfd.readouterr().err


def test_a_package_that_requires_what_was_never_released_does_not_install(
    workspace: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = workspace / "packages/opt-b/pyproject.toml"
    path.write_text(path.read_text().replace("opt-a>=0.1,<0.2", "opt-a>=0.2,<0.3"))
    assert main(["rehearse", "--out", str(tmp_path / "dist")], root=workspace) == 1
    captured = capfd.readouterr()
    assert "opt-a 0.1.0 published" in captured.out
    assert "opt-a>=0.2" in captured.err


@pytest.mark.parametrize(
    ("version", "api", "expected"),
    [
        ("0.1.1", ["answer", "more"], "0 incompatible changes since 0.1.0"),
        ("0.1.1", ["more"], "expected 0.1.1 to keep the API of 0.1.0"),
        ("0.2.0", ["more"], "1 incompatible changes since 0.1.0"),
        ("0.1.0", ["more"], "no earlier release to compare with"),
    ],
)
def test_what_breaks_the_api_needs_a_version_that_may(
    version: str,
    api: list[str],
    expected: str,
    tmp_path: Path,
    make_package: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = make_package("opt-a")
    git(tmp_path, "init", "-b", "main")
    commit(tmp_path)
    git(tmp_path, "tag", "opt-a-v0.1.0")
    make_package("opt-a", version=version)
    lines = ['"""A package."""', f"__all__ = {api}", *(f"{name} = 42" for name in api)]
    (folder / "src/opt_a/__init__.py").write_text("\n".join(lines))
    code = main(["api", "opt-a"], root=tmp_path)
    captured = capfd.readouterr()
    assert code == ("expected" in expected), captured.err
    assert expected in captured.out + captured.err
