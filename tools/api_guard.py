"""Compares the public API of a package with its last release, by Griffe.

Before 1.0 a new minor version may break what the last one promised, afterwards a new major one.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from isolation import CheckError
from packaging.version import Version
from workspace import Package


def check_api(package: Package) -> str:
    """Checks that what has become incompatible has a version that allows it.

    Returns:
        One line: with which release it was compared, and how many changes its version allows.

    Raises:
        CheckError: The API has changed incompatibly under a compatible version; lists where.
    """
    root = package.folder.parents[1]
    last = last_release(package)
    if last is None:
        return f"{package.name} {package.version}: no earlier release to compare with"
    found = _griffe(root, package, f"{package.name}-v{last}")
    if found and not may_break(last, Version(package.version)):
        raise CheckError(
            f"{package.name}: expected {package.version} to keep the API of {last}; found\n"
            + "\n".join(found)
            + "\nKeep the old form, or raise the "
            + ("minor" if last.major == 0 else "major")
            + " version."
        )
    return f"{package.name} {package.version}: {len(found)} incompatible changes since {last}"


def last_release(package: Package) -> Version | None:
    """Returns the newest tagged version of the package's history other than its own."""
    prefix = f"{package.name}-v"
    command = ["git", "tag", "--merged", "HEAD", "--list", f"{prefix}*"]
    tags = _run(command, package.folder).stdout.split()
    versions = {Version(tag.removeprefix(prefix)) for tag in tags} - {Version(package.version)}
    return max(versions, default=None)


def may_break(last: Version, new: Version) -> bool:
    """Whether semantic versioning lets `new` break the API of `last`.

    Examples:
        >>> may_break(Version("0.1.3"), Version("0.2.0")), may_break(Version("1.1"), Version("1.2"))
        (True, False)
    """
    return new.release[: 1 if last.major else 2] != last.release[: 1 if last.major else 2]


def _griffe(root: Path, package: Package, tag: str) -> list[str]:
    griffe = shutil.which("griffe", path=str(Path(sys.executable).parent)) or "griffe"
    source = str(package.source.parent.relative_to(root))
    command = [griffe, "check", package.import_name, "--search", source, "--against", tag]
    done = _run([*command, "--no-color", "--format", "oneline"], root)
    found = [line for line in (done.stdout + done.stderr).splitlines() if line]
    if done.returncode not in (0, 1) or bool(done.returncode) != bool(found):
        raise CheckError(f"{' '.join(command)}\nended with code {done.returncode}:\n{found}")
    return found


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise CheckError(
            f"no `{command[0]}` found: `python -m pip install griffe`, or run this by `hatch run`"
        ) from error
