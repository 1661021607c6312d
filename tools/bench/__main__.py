"""Runs the benchmarks: one table, JSON and pictures of every figure.

    hatch run dev:bench --quick
    hatch run dev:bench --only adafactor multi_steps --out bench-results

Each file runs in a process of its own, one after the other; see `_common.py` for what a file needs.
The exit status is 1 where a file fails or a figure is over its limit by more than its spread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _common import PLATFORMS, label, table, verdict
from _report import changes, draw
from tqdm import tqdm

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("[!_]*.py"))


def run(name: str, flags: list[str]) -> dict[str, Any] | None:
    """Runs one file; `None` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / f"{name}.py"), *flags, "--json", str(file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode or not file.exists():
            return None
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def save(out: Path, rows: list[dict[str, Any]], failed: list[str], machines: Any) -> None:
    """Writes what was measured so far, so that a run that is stopped loses one file at most."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").write_text(table(rows) + "\n")
    content = {"machines": machines, "failed": failed, "rows": rows}
    (out / "figures.json").write_text(json.dumps(content, indent=1))


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--device", choices=PLATFORMS, help="otherwise JAX's choice")
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--out", type=Path, help="folder for table, JSON and pictures")
    parser.add_argument("--last", type=Path, help="JSON of an earlier run, to compare with")
    options = parser.parse_args()
    flags = ["--quick"] * options.quick
    flags += ["--device", options.device] if options.device else []

    last: list[dict[str, Any]] | None = None
    if options.last and options.last.exists():  # before `--out` writes the same file
        last = json.loads(options.last.read_text())["rows"]
    records: list[dict[str, Any]] = []
    machines: dict[str, Any] = {}
    failed = []
    for name in (bar := tqdm(options.only)):
        bar.set_description(name)
        if (found := run(name, flags)) is None:
            failed.append(name)
            continue
        machines[name] = found["machine"]
        records += found["rows"]
        if options.out:
            save(options.out, records, failed, machines)

    text = table(records)
    if last is not None:
        ran = {record["benchmark"] for record in records}
        lines = changes(records, [record for record in last if record["benchmark"] in ran])
        text += "\n\nSince the last run:\n" + "\n".join(lines or ["nothing has changed"])
    print(text)
    if options.out:
        save(options.out, records, failed, machines)
        (options.out / "table.txt").write_text(text + "\n")
        draw(records, options.out)
    over = [label(record) for record in records if verdict(record) == "OVER"]
    for kind, names in (("failed", failed), ("over the limit", over)):
        if names:
            print(f"{kind}: {', '.join(names)}", file=sys.stderr)
    return bool(failed or over)


if __name__ == "__main__":
    sys.exit(main())
