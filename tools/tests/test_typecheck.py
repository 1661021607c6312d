"""How the type checker is called."""

from pathlib import Path

import pytest
from typecheck import main, targets


def _write(root: Path, *paths: str, text: str = "") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_sources_share_a_call_and_tests_do_not(tmp_path: Path) -> None:
    _write(
        tmp_path,
        "packages/opt-a/src/opt_a/__init__.py",
        "packages/opt-a/tests/test_public_api.py",
        "packages/opt-b/src/opt_b/__init__.py",
        "packages/opt-b/tests/test_public_api.py",
        "packages/opt-c/src/opt_c/__init__.py",
        "packages/opt-c/tests/data.json",
        "tools/release.py",
    )
    (tmp_path / "examples").mkdir()
    assert targets(tmp_path) == [
        ["packages/opt-a/src", "packages/opt-b/src", "packages/opt-c/src"],
        ["packages/opt-a/tests"],
        ["packages/opt-b/tests"],
        ["tools"],
    ]


def test_an_empty_workspace_has_nothing_to_check(tmp_path: Path) -> None:
    assert targets(tmp_path) == []


@pytest.mark.slow
def test_every_call_is_made_and_one_failure_fails_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, "pyproject.toml", text="[tool.mypy]\nstrict = true\n")
    _write(tmp_path, "packages/opt-a/src/opt_a/__init__.py", text="x: int = 'a'\n")
    _write(tmp_path, "tools/fine.py", text="x: int = 1\n")
    assert main([], root=tmp_path) == 1
    output = capfd.readouterr().out
    assert "__init__.py:1: error: Incompatible types" in output
    assert "FAILED  mypy packages/opt-a/src" in output
    assert "passed  mypy tools" in output
    assert main(["tools"], root=tmp_path) == 0
