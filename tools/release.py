"""Check, build and describe the packages of this repository.

    python tools/release.py check opt-core --python 3.12 --resolution lowest-direct
    python tools/release.py check --all --jobs 2 --tests contract
    python tools/release.py check --all --resolution highest lowest-direct --tests changed
    python tools/release.py check --tag opt-core-v0.1.0
    python tools/release.py build opt-core --out dist
    python tools/release.py api opt-core
    python tools/release.py rehearse --out dist
    python tools/release.py version opt-core

`check` compares the version with the changelog (and the tag), builds the wheel from the sdist, and
tests it in isolation: see `isolation.py`. `api` compares with the last release: see `api_guard.py`.
`rehearse` releases all of them into a local index: see `rehearsal.py`.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path

from api_guard import check_api
from isolation import CheckError, Trial, Uv, try_package
from rehearsal import rehearse
from workspace import ROOT, Package, closure, read_packages, siblings

_UNRELEASED = "unreleased"
# pytest's `-m` of each choice of tests.
_ALL = "not slow"
_CONTRACT = "contract and not slow"


def check_changelog(package: Package) -> str:
    """Checks that the top heading of the changelog has the version; returns the release date.

    Raises:
        CheckError: The heading differs, or has neither a date nor `unreleased`.
    """
    path = package.folder / "CHANGELOG.md"
    top = re.search(r"^## .*$", path.read_text(), re.MULTILINE)
    heading = top.group() if top else "no heading"
    version, _, when = heading.removeprefix("## ").partition(" - ")
    if version != package.version or not (when == _UNRELEASED or _is_date(when)):
        raise CheckError(
            f"{path}: expected `## {package.version} - {_UNRELEASED}` or `## {package.version} - "
            f"YYYY-MM-DD` on top, found `{heading}`. Make it agree with pyproject.toml."
        )
    return when


def check_tag(package: Package, tag: str) -> None:
    """Checks that `tag` has the package's version, and that the changelog has a release date.

    Raises:
        CheckError: It does not.
    """
    expected = f"{package.name}-v{package.version}"
    if tag != expected:
        raise CheckError(
            f"{package.name}: expected the tag `{expected}` of pyproject.toml's version, found "
            f"`{tag}`. Tag the commit that changes the version."
        )
    if check_changelog(package) == _UNRELEASED:
        raise CheckError(
            f"{package.name}: expected the day of the release in CHANGELOG.md, found "
            f"`{_UNRELEASED}`. Write the day, commit, and move the tag."
        )


def changed(packages: Mapping[str, Package], base: str) -> Set[str]:
    """Returns the packages whose code, tests or metadata differ from `base`, ignoring Markdown.

    Args:
        packages: The workspace.
        base: A revision. Where `HEAD` is that revision or older (a push to `main`), the change is
            what the last commit, or the last merge, brought to its first parent.

    Raises:
        CheckError: Git does not know `base`.
    """
    root = next(iter(packages.values())).folder.parents[1]
    fork = _git(root, "merge-base", base, "HEAD")
    if fork == _git(root, "rev-parse", "HEAD"):
        fork = _git(root, "rev-parse", "HEAD^1")
    # A moved file counts for both packages.
    files = _git(root, "diff", "--name-only", "--no-renames", "-z", fork).split("\0")
    code = [Path(file) for file in files if file and not file.endswith(".md")]
    return {name for name in packages if any(Path("packages", name) in f.parents for f in code)}


def build(package: Package, out: Path, uv: Uv) -> None:
    """Builds the sdist, and the wheel from that sdist, into `out`."""
    uv("build", "--quiet", "--out-dir", out, package.folder)


def check(
    chosen: Sequence[tuple[Package, Trial]],
    packages: Mapping[str, Package],
    *,
    uv: Uv,
    work: Path,
    keep: bool = False,
    jobs: int = 1,
) -> bool:
    """Checks packages, printing a line for each trial.

    Args:
        chosen: What to check, and in which environment.
        packages: The workspace.
        uv: The builder and installer.
        work: An empty folder outside the checkout.
        keep: Whether to leave in it what each trial made.
        jobs: How many to try at a time.

    Returns:
        Whether all passed.
    """
    arrows = {name: siblings(package, packages) for name, package in packages.items()}
    wheels = work / "dist"
    for name in sorted(closure((package.name for package, _ in chosen), arrows)):
        build(packages[name], wheels, uv)

    def attempt(package: Package, trial: Trial) -> str:
        check_changelog(package)
        folder = work / f"{package.name}-{trial.resolution}"
        try:
            return try_package(package, trial, uv=uv, wheels=wheels, work=folder)
        finally:
            # An environment with JAX takes most of a gigabyte.
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(partial(_report, attempt), *zip(*chosen, strict=True))))


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the command line."""
    options = _parser().parse_args(argv)
    packages = read_packages(root)
    try:
        return int(options.run(options, packages))
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run_check(options: argparse.Namespace, packages: Mapping[str, Package]) -> int:
    wanted = list(packages) if options.all else options.dist
    if options.tag and not wanted:
        wanted = [options.tag.rpartition("-v")[0]]
    chosen = [_find(name, packages) for name in wanted]
    if not chosen:
        raise CheckError("nothing to check: name packages, or give --all or --tag")
    for package in chosen if options.tag else ():
        check_tag(package, options.tag)
    whole = changed(packages, options.base) if options.tests == "changed" else packages.keys()

    def trial(package: Package, resolution: str) -> Trial:
        everything = options.tests == "all" or (
            options.tests != "contract" and resolution == "lowest-direct" and package.name in whole
        )
        return Trial(options.python, resolution, _ALL if everything else _CONTRACT)

    trials = [
        (package, trial(package, resolution))
        for package in chosen
        for resolution in options.resolution
    ]
    trials.sort(key=lambda tried: tried[1].markers != _ALL)  # the long ones first
    with tempfile.TemporaryDirectory(prefix="release-") as scratch:
        work = (options.keep or Path(scratch)).resolve()
        if work.is_dir() and any(work.iterdir()):
            raise CheckError(f"--keep: expected an empty folder, found {work} with content")
        keep = options.keep is not None
        passed = check(*(trials, packages), uv=Uv.find(), work=work, keep=keep, jobs=options.jobs)
    return 0 if passed else 1


def _run_build(options: argparse.Namespace, packages: Mapping[str, Package]) -> int:
    build(_find(options.dist, packages), options.out, Uv.find())
    return 0


def _run_api(options: argparse.Namespace, packages: Mapping[str, Package]) -> int:
    print(check_api(_find(options.dist, packages)))
    return 0


def _run_rehearse(options: argparse.Namespace, packages: Mapping[str, Package]) -> int:
    if options.out.is_dir() and any(options.out.glob("*.whl")):
        raise CheckError(f"--out: expected a folder without wheels, found some in {options.out}")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        steps = rehearse(
            packages, uv=Uv.find(), dist=options.out, work=Path(scratch), python=options.python
        )
        for step in steps:
            print(step, flush=True)
    return 0


def _run_version(options: argparse.Namespace, packages: Mapping[str, Package]) -> int:
    print(_find(options.dist, packages).version)
    return 0


def _report(attempt: Callable[[Package, Trial], str], package: Package, trial: Trial) -> bool:
    start = time.monotonic()
    try:
        verdict, passed = attempt(package, trial), True
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        verdict, passed = "see the error above", False
    title = f"{'passed' if passed else 'FAILED'}  {package.name} {package.version}"
    print(f"{title} ({time.monotonic() - start:.0f} s): {verdict}", flush=True)
    return passed


def _find(name: str, packages: Mapping[str, Package]) -> Package:
    if name not in packages:
        raise CheckError(f"no package `{name}`; there are {', '.join(packages)}")
    return packages[name]


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(
            f"{' '.join(command)}: {done.stderr.strip()}\nFetch the base with its history, or name "
            "another --base."
        )
    return done.stdout.strip()


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    checking = commands.add_parser("check", help="try wheels alone, against their own tests")
    checking.add_argument("dist", nargs="*", metavar="DIST")
    checking.add_argument("--all", action="store_true", help="every package")
    checking.add_argument("--tag", help="the git tag that releases the package")
    checking.add_argument("--python", default=sys.executable, help="a version or an interpreter")
    checking.add_argument(
        "--resolution",
        nargs="+",
        default=["highest"],
        choices=["highest", "lowest-direct"],
        help="the newest versions, the oldest that a package claims, or both",
    )
    checking.add_argument(
        "--tests",
        default="all",
        choices=["all", "contract", "oldest", "changed"],
        help="which tests: all; those marked `contract`; these, and all with the oldest versions; "
        "these, and all with the oldest versions of the packages that differ from --base",
    )
    checking.add_argument("--base", default="origin/main", help="a revision, for --tests changed")
    checking.add_argument("--keep", type=Path, metavar="DIR", help="work there and leave it")
    checking.add_argument("--jobs", type=int, default=1, help="packages at a time")
    checking.set_defaults(run=_run_check)

    building = commands.add_parser("build", help="build the sdist, and the wheel from it")
    building.add_argument("dist", metavar="DIST")
    building.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    building.set_defaults(run=_run_build)

    comparing = commands.add_parser("api", help="compare the API with that of the last release")
    comparing.add_argument("dist", metavar="DIST")
    comparing.set_defaults(run=_run_api)

    rehearsing = commands.add_parser("rehearse", help="release all packages into a local index")
    rehearsing.add_argument("--python", default=sys.executable, help="a version or an interpreter")
    rehearsing.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    rehearsing.set_defaults(run=_run_rehearse)

    telling = commands.add_parser("version", help="print a package's version")
    telling.add_argument("dist", metavar="DIST")
    telling.set_defaults(run=_run_version)
    return parser


if __name__ == "__main__":
    sys.exit(main())
