"""Run mypy over everything that holds Python, in as many calls as it needs.

    python tools/typecheck.py
    python tools/typecheck.py packages/opt-core/tests

mypy knows a file by its module name, so that two `tests` folders with a `test_public_api.py`
each cannot share a call. Without arguments: all sources at once, then every other folder.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from workspace import ROOT

_FOLDERS = ("packages/*/tests", "tests-integration", "examples", "tools")


def targets(root: Path) -> list[list[str]]:
    """The folders of each call, relative to `root`; one without Python files is left out."""
    sources = [path for path in sorted(root.glob("packages/*/src")) if _holds_python(path)]
    rest = [path for pattern in _FOLDERS for path in sorted(root.glob(pattern))]
    calls = [sources, *([path] for path in rest if _holds_python(path))]
    return [[path.relative_to(root).as_posix() for path in call] for call in calls if call]


def run_mypy(root: Path, folders: Sequence[str]) -> bool:
    """Whether mypy, as the root `pyproject.toml` configures it, has nothing to say."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *folders]
    passed = subprocess.run(command, cwd=root, check=False).returncode == 0
    print(f"{'passed' if passed else 'FAILED'}  mypy {' '.join(folders)}", flush=True)
    return passed


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line."""
    arguments = sys.argv[1:] if argv is None else argv
    calls = [[folder] for folder in arguments] or targets(root)
    results = [run_mypy(root, folders) for folders in calls]
    return 0 if all(results) else 1


def _holds_python(folder: Path) -> bool:
    return any(folder.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
