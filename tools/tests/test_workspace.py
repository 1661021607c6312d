"""The reader of the workspace, and the workspace."""

from collections.abc import Callable
from pathlib import Path

from workspace import ROOT, closure, read_packages, siblings


def test_a_package_is_read_from_its_project_table(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    folder = make_package("opt-a", ["jax>=0.8"], extras={"test": ["pytest>=8"]}, version="0.3.1")
    package = read_packages(tmp_path)["opt-a"]
    assert (package.name, package.version, package.folder) == ("opt-a", "0.3.1", folder)
    assert package.import_name == "opt_a"
    assert package.source == folder / "src" / "opt_a"
    assert [str(r) for r in package.all_requirements()] == ["jax>=0.8", "pytest>=8"]


def test_siblings_are_found_in_extras_and_under_any_spelling(
    tmp_path: Path, make_package: Callable[..., Path]
) -> None:
    make_package("opt-a")
    make_package("opt-b", ["Opt_A>=0.1", "jax"], extras={"c": ["opt-c"], "all": ["opt-b[c]"]})
    make_package("opt-c")
    packages = read_packages(tmp_path)
    assert siblings(packages["opt-b"], packages) == {"opt-a", "opt-c"}


def test_closure_ends_on_a_cycle() -> None:
    assert closure(["a"], {"a": ["b"], "b": ["a"]}) == {"a", "b"}


def test_every_folder_of_this_repository_has_the_name_of_its_package() -> None:
    packages = read_packages()
    assert set(packages) == {folder.name for folder in (ROOT / "packages").iterdir()}
    for name, package in packages.items():
        assert package.name == name
        assert package.folder == ROOT / "packages" / name
        assert (package.source / "__init__.py").is_file()
