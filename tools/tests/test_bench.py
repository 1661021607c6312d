"""The common module of the benchmarks, and what is written about a run."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _common
import _report
import jax
import jax.numpy as jnp
import pytest
from _common import Figure, Row, as_record, counted, counts, interleave, timed


def record(ratio: float, half_spread: float, *, limit: float | None = 1.1) -> dict[str, Any]:
    row = Row("call", ratio, 1.0, ratio, ratio - half_spread, ratio + half_spread, ratio, 10)
    return {"benchmark": "step", "sizes": "leaves", **as_record(row, Figure("raw", limit))}


def test_calls_take_turns_and_the_first_round_is_thrown_away() -> None:
    order: list[str] = []
    ticks = iter(range(100))
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    found = interleave(calls, 2, clock=lambda: float(next(ticks)))
    assert "".join(order) == "cab" + "abc" + "bca"
    assert found == {name: [1.0, 1.0] for name in "abc"}


def test_the_ratio_is_the_median_of_ratios_within_a_round() -> None:
    row = timed("call", [2.0, 30.0, 4.0], [1.0, 10.0, 4.0])
    assert (row.ratio, row.ours, row.theirs, row.least) == (2.0, 4.0, 4.0, 2.0)
    assert (row.low, row.high) == (1.0, 3.0)


def test_a_count_of_nothing_has_no_ratio() -> None:
    assert counted("x", 0, 0).ratio == 1.0
    assert counted("x", 1, 0).ratio == float("inf")


def test_counts_of_a_program() -> None:
    def step(params: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    found = counts(jax.jit(step, donate_argnums=0).lower(params, params).compile())
    assert found.aliases == 2
    assert found.bytes_accessed >= 3 * 4 * (64 * 64 + 64)
    assert found.collectives == {}
    assert not found.misleading
    assert found.instructions > 4


def test_a_loop_counts_once_and_is_noted() -> None:
    def bytes_of(trips: int) -> _common.Counts:
        def run(x: Any, n: Any) -> Any:
            return jax.lax.fori_loop(0, n * trips, lambda i, x: jnp.sin(x) * i, x)

        return counts(jax.jit(run).lower(jnp.ones(1000), 3).compile())

    once, often = bytes_of(1), bytes_of(1000)
    assert often.bytes_accessed == pytest.approx(once.bytes_accessed, rel=0.01)
    assert "counted once" in often.misleading


def test_of_a_cond_the_dearest_branch_is_counted() -> None:
    def bytes_of(branches: int) -> _common.Counts:
        def run(x: Any, y: Any, flag: Any) -> Any:
            other = (lambda x, y: x @ y) if branches == 2 else (lambda x, y: x)
            return jax.lax.cond(flag, lambda x, y: x @ y, other, x, y)

        x = jnp.ones((256, 256))
        return counts(jax.jit(run).lower(x, x, True).compile())

    one, two = bytes_of(1), bytes_of(2)
    assert two.flops == pytest.approx(one.flops, rel=0.01)
    assert "dearest" in one.misleading


@pytest.mark.parametrize(
    ("ratio", "half_spread", "verdict"),
    [(1.05, 0.2, "ok"), (1.15, 0.1, "?"), (1.25, 0.1, "OVER")],
)
def test_verdicts(ratio: float, half_spread: float, verdict: str) -> None:
    assert _common.verdict(record(ratio, half_spread)) == verdict
    assert _common.verdict(record(ratio, half_spread, limit=None)) == ""


def test_a_change_is_more_than_both_spreads() -> None:
    assert _report.changes([record(1.05, 0.1)], [record(1.0, 0.1)]) == []
    assert _report.changes([record(1.09, 0.001)], [record(1.0, 0.02)]) == [
        "step: call (10): 1.00 -> 1.09 of raw"
    ]
    assert _report.changes([record(1.3, 0.1)], [record(1.05, 0.1)]) == [
        "step: call (10): 1.05 -> 1.30 of raw",
        "step: call (10): ok -> OVER",
    ]
    assert _report.changes([], [record(1.0, 0.1)]) == ["gone: step: call (10)"]
    assert _report.changes([record(1.0, 0.1)], []) == ["new: step: call (10)"]


def test_pictures_are_drawn_where_there_is_something_to_draw(tmp_path: Path) -> None:
    larger = {**record(1.2, 0.1), "size": 100}
    size = {**record(1.0, 0.0), "figure": "size", "unit": "B"}
    assert _report.draw([record(1.0, 0.1)], tmp_path) == [tmp_path / "ratios.png"]
    drawn = _report.draw([record(1.0, 0.1), larger, size], tmp_path)
    assert [path.stem for path in drawn] == ["ratios", "sizes", "bytes"]
    assert all(path.stat().st_size > 1000 for path in drawn)


def run_main(monkeypatch: pytest.MonkeyPatch, file: Path, rows: list[Row]) -> None:
    def measure(options: argparse.Namespace) -> Iterator[Row]:
        yield from rows

    monkeypatch.setattr(sys, "argv", ["step.py", "--json", str(file)])
    _common.main("A doc.", {"call": Figure("raw", 1.1)}, measure)


def test_a_benchmark_writes_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    run_main(monkeypatch, file, [counted("call", 2, 1, size=10)])
    written = json.loads(file.read_text())
    assert written["machine"]["jax"] == jax.__version__
    [row] = written["rows"]
    assert (row["benchmark"], row["ratio"], row["limit"]) == ("step", 2.0, 1.1)


def test_a_figure_without_a_row_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="not measured: call"):
        run_main(monkeypatch, tmp_path / "rows.json", [])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_benchmark_gets_as_many_devices_as_it_needs(tmp_path: Path, device: str | None) -> None:
    program = tmp_path / "step.py"
    program.write_text(
        "import jax\n"
        "from _common import Figure, counted, main\n"
        "def measure(options): yield counted('devices', jax.device_count(), 8)\n"
        "main('A doc.', {'devices': Figure('eight', 1.0, '')}, measure, devices=8)\n"
    )
    file = tmp_path / "rows.json"
    command = [sys.executable, str(program), "--json", str(file)]
    command += ["--device", device] if device else []
    environment = {**os.environ, "PYTHONPATH": str(Path(_common.__file__).parent)}
    subprocess.run(command, check=True, env=environment)
    written = json.loads(file.read_text())
    assert written["rows"][0]["ours"] == 8
    assert (written["machine"]["platform"], written["machine"]["devices"]) == ("cpu", 8)


def load_command() -> Any:
    """Returns `tools/bench/__main__.py`, whose name is that of the tests' own main module."""
    path = Path(_common.__file__).parent / "__main__.py"
    spec = importlib.util.spec_from_file_location("bench_command", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_a_benchmark_of_the_command() -> None:
    command = load_command()
    files = {path.stem: path.read_text() for path in command.HERE.glob("*.py")}
    assert {name for name in files if not name.startswith("_")} == set(command.NAMES)
    assert all("main(__doc__, FIGURES, measure" in files[name] for name in command.NAMES)


def test_a_run_that_is_stopped_keeps_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = load_command()

    def run(name: str, flags: list[str]) -> dict[str, Any] | None:
        if name == "scale":
            raise KeyboardInterrupt
        return {"machine": {}, "rows": [{**record(1.0, 0.01), "benchmark": name}]}

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "verify", "scale", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        command.main()
    (row,) = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert row["benchmark"] == "verify"
    assert "verify: call (10)" in (tmp_path / "table.txt").read_text()


def test_a_run_says_what_has_changed_since_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every night: the second run is held against what the first wrote."""
    command, ratios = load_command(), iter([1.0, 1.3, 1.3])

    def run(name: str, flags: list[str]) -> dict[str, Any] | None:
        assert flags == ["--quick"]
        found = {**record(next(ratios), 0.01), "benchmark": name}
        return None if name == "scale" else {"machine": {}, "rows": [found]}

    monkeypatch.setattr(command, "run", run)

    def status(*only: str) -> int:
        flags = ["--quick", "--out", str(tmp_path), "--last", str(tmp_path / "figures.json")]
        monkeypatch.setattr(sys, "argv", ["bench", "--only", *only, *flags])
        return int(command.main())

    assert status("verify") == 0
    assert "Since the last run" not in capsys.readouterr().out
    assert status("verify", "scale") == 1  # one is over its limit, the other does not run
    said = capsys.readouterr()
    assert "verify: call (10): 1.00 -> 1.30 of raw\nverify: call (10): ok -> OVER" in said.out
    assert "failed: scale\nover the limit: verify: call (10)" in said.err
    assert (tmp_path / "table.txt").read_text() == said.out
    assert json.loads((tmp_path / "figures.json").read_text())["failed"] == ["scale"]
