"""The common module of the benchmarks, and the command."""

import subprocess
import sys
from pathlib import Path

import _common
import jax
from _common import counted, interleave, timed

BENCH = Path(_common.__file__).parent


def test_calls_take_turns_and_the_first_round_is_thrown_away() -> None:
    order: list[str] = []
    ticks = iter(range(100))
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    found = interleave(calls, 2, clock=lambda: float(next(ticks)))
    assert "".join(order) == "cab" + "abc" + "bca"
    assert found == {name: [1.0, 1.0] for name in "abc"}


def test_the_ratio_is_the_median_of_ratios_within_a_round() -> None:
    row = timed("call", [2.0, 30.0, 4.0], "raw", [1.0, 10.0, 4.0], limit=1.5, size=1000)
    assert (row.ours, row.ratio, row.low, row.high) == (4.0, 2.0, 1.0, 3.0)
    words = "call (1,000) 4 = 2.00 x raw 1.00 to 3.00 limit 1.5 ?"
    assert str(row).split() == words.split()


def test_a_count_of_nothing_has_no_ratio() -> None:
    assert counted("x", 0, "none", 0).ratio == 1.0
    assert counted("x", 1, "none", 0, limit=1.0).verdict == "OVER"


def test_a_figure_over_its_limit_fails(tmp_path: Path) -> None:
    for file in ("__main__.py", "_common.py"):
        (tmp_path / file).write_text((BENCH / file).read_text())
    (tmp_path / "over.py").write_text(
        "import jax\nfrom _common import counted\nDEVICES = 2\n"
        "def measure(quick):\n"
        "    yield counted('devices', jax.device_count(), 'two', 2, limit=1.0)\n"
        "    yield counted('quick', quick, 'none', 0, limit=1.0)\n"
    )
    command = [sys.executable, str(tmp_path), "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("failed, or over a limit: over\n")
    head, *rows = done.stdout.splitlines()
    assert head.startswith(f"over: jax {jax.__version__}, 2 of cpu, load ")
    assert [row.split()[:2] for row in rows] == [["devices", "2"], ["quick", "1"]]
