"""Print the packages that a change touches, with every package that depends on them.

    python tools/affected.py                    # since the merge base with origin/main
    python tools/affected.py --base HEAD~3 --json
    python tools/affected.py --all --github-output

A change inside a package affects it and its dependants; one in the documentation, the examples
or the integration tests affects no package; one anywhere else (tool configuration, tools,
workflows, a file nobody thought of) affects them all.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workspace import ROOT, Package, closure, read_packages, siblings

# Folders whose content no package is built from or tested by.
_OUTSIDE_FOLDERS = {"docs", "examples", "tests-integration"}


@dataclass(frozen=True)
class Affected:
    """What a change asks to be tested again."""

    packages: tuple[str, ...]
    integration: bool


def affected(changed: Iterable[str], packages: Mapping[str, Package]) -> Affected:
    """Says what has to be tested after a change.

    Args:
        changed: Paths of changed files, relative to the root, with `/`.
        packages: The workspace's packages by name.

    Returns:
        The touched packages with their dependants, sorted, and whether the integration tests
        are concerned, which they are by every change.
    """
    changed = set(changed)
    touched: set[str] = set()
    for path in changed:
        touched |= _touched(PurePosixPath(path), packages)
    return Affected(tuple(sorted(closure(touched, dependants(packages)))), bool(changed))


def dependants(packages: Mapping[str, Package]) -> dict[str, set[str]]:
    """For each package, those that name it among their requirements or extras."""
    required = {name: siblings(package, packages) for name, package in packages.items()}
    return {name: {other for other in packages if name in required[other]} for name in packages}


def changed_files(root: Path, base: str) -> list[str]:
    """The files that differ between the working tree and its merge base with `base`."""
    fork = _git(root, "merge-base", base, "HEAD").strip()
    # A moved file counts at both ends.
    listing = _git(root, "diff", "--name-only", "--no-renames", "-z", fork)
    return [path for path in listing.split("\0") if path]


def github_output(result: Affected) -> str:
    """The result as lines for the file that `GITHUB_OUTPUT` names."""
    packages = json.dumps(result.packages)
    return f"packages={packages}\nintegration={str(result.integration).lower()}\n"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line."""
    options = _parser().parse_args(argv)
    packages = read_packages(root)
    if options.all:
        result = Affected(tuple(packages), True)
    else:
        try:
            result = affected(changed_files(root, options.base), packages)
        except subprocess.CalledProcessError as error:
            print(f"no diff against {options.base!r}: {error.stderr.strip()}", file=sys.stderr)
            print("Fetch it with its history, or name another --base.", file=sys.stderr)
            return 2
    if options.github_output:
        with Path(os.environ["GITHUB_OUTPUT"]).open("a") as stream:
            stream.write(github_output(result))
    print(json.dumps(result.packages) if options.json else "\n".join(result.packages))
    return 0


def _touched(path: PurePosixPath, packages: Mapping[str, Package]) -> set[str]:
    top, *rest = path.parts
    if top == "packages" and rest and rest[0] in packages:
        return {rest[0]}
    if top in _OUTSIDE_FOLDERS or (not rest and path.suffix == ".md"):
        return set()
    return set(packages)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="origin/main", help="compare with this revision")
    parser.add_argument("--all", action="store_true", help="every package, whatever changed")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    parser.add_argument(
        "--github-output", action="store_true", help="also write packages= and integration="
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
