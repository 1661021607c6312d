"""What the benchmarks of this folder share: figures, interleaved timing, counts, a command line.

A benchmark is a file here that declares what it measures and ends by handing itself over:

    FIGURES = {"trace": Figure("raw Optax", limit=1.05), "bytes": Figure("raw Optax", 1.0, "B")}

    def arguments(parser): ...                  # its own options; every one has a default
    def measure(options) -> Iterator[Row]:      # `options.quick`: small shapes, few rounds
        times = interleave({"raw Optax": theirs, "trace": ours}, rounds=7)
        yield timed("trace", times["trace"], times["raw Optax"], size=1000)
        yield counted("bytes", counts(ours).bytes_accessed, counts(theirs).bytes_accessed)

    if __name__ == "__main__":
        main(__doc__, FIGURES, measure, arguments)

That makes it a program (`hatch run dev:python tools/bench/NAME.py --quick`) and a part of
`hatch run dev:bench`, which runs each file in a process of its own. Ours and the peer always run in
one process, in turn. Every row must belong to one of the `FIGURES`, and every figure must get one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend
import optax
from tqdm import tqdm

PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
"""The value of `JAX_PLATFORMS` for each `--device`."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Something that is claimed.

    Attributes:
      peer: what ours is held against.
      limit: the highest ratio to the peer that is still as claimed; `None` where none is.
      unit: `'s'`, `'B'`, or a word for what is counted.
    """

    peer: str
    limit: float | None = None
    unit: str = "s"


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure, measured once.

    Attributes:
      figure: its name in `FIGURES`.
      ours: the median, in the figure's unit.
      theirs: that of the peer.
      ratio: of ours to the peer's in the same round, the median over rounds.
      low: the lower quartile of those ratios.
      high: the upper quartile.
      least: the ratio of the least times: what is left when nothing disturbs either.
      size: the number of leaves, or of whatever else grows.
      note: what the figure does not say.
    """

    figure: str
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    least: float
    size: int | None = None
    note: str = ""


def timed(
    figure: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    size: int | None = None,
    note: str = "",
) -> Row:
    """Returns the row of two series of times that were taken in turn."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(
        figure,
        statistics.median(ours),
        statistics.median(theirs),
        middle,
        low,
        high,
        min(ours) / min(theirs),
        size,
        note,
    )


def counted(
    figure: str, ours: float, theirs: float, *, size: int | None = None, note: str = ""
) -> Row:
    """Returns the row of two counts, which have no spread."""
    ratio = ours / theirs if theirs else float("inf") if ours else 1.0
    return Row(figure, ours, theirs, ratio, ratio, ratio, ratio, size, note)


def seconds(call: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Returns how long one call takes, its arrays ready."""
    start = clock()
    jax.block_until_ready(call())
    return clock() - start


def interleave(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.process_time,
    warm_up: bool = True,
) -> dict[str, list[float]]:
    """Times every call once a round, each round beginning with another one.

    Garbage is collected between rounds, not in them. `process_time` counts the seconds of all
    cores and is what a busy machine disturbs least; `thread_time` counts those of the caller alone,
    as a dispatch takes; `perf_counter` is for what waits.

    Args:
      calls: what to time, by name.
      rounds: how often.
      clock: returns seconds.
      warm_up: whether a first round is thrown away.
    """
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what exists now is not looked through in each of hundreds of rounds
    try:
        for i in tqdm(range(-warm_up, rounds), leave=False, desc=names[-1], disable=None):
            with no_garbage():
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    spent = seconds(calls[name], clock)
                    if i >= 0:
                        found[name].append(spent)
    finally:
        gc.unfreeze()
    return found


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Collects garbage now, and none before the end: going through everything takes 0.1 s."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Step = Callable[..., Any]
Variant = tuple[Step, tuple[Any, ...]]  # a function and its operands


def trace(step: Step, operands: Sequence[Any]) -> Any:
    """Traces a step without hitting the cache of `jit`, which is keyed by the function."""
    return jax.jit(lambda *args: step(*args)).trace(*operands)


def optax_step(tx: Any) -> Step:
    """Returns one step of a transformation: `(params, state, grads) -> (params, state)`."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a compiled program consists of.

    Attributes:
      bytes_accessed: bytes that XLA says are read and written.
      flops: floating-point operations, by XLA.
      instructions: instructions of the optimised program, those inside of fusions included.
      collectives: how many of them are collectives, by name.
      aliases: results that take over the memory of an argument.
      temporaries: bytes held besides arguments and results.
      misleading: why `bytes_accessed` and `flops` are not what the program does.
    """

    bytes_accessed: float
    flops: float
    instructions: int
    collectives: Mapping[str, int]
    aliases: int
    temporaries: int
    misleading: str


_COLLECTIVE = re.compile(
    r"\s(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
# What `cost_analysis` gets wrong, by what stands in the program.
_MISLEADING = {
    r"\swhile\(": "the body of a loop is counted once, whatever the number of iterations",
    r"\sconditional\(": "of the branches of a `cond` the dearest is counted, taken or not",
    r"\sdynamic-(?:update-)?slice\(": "where a stack is sliced inside a fusion, the whole stack "
    "may be counted for the slice",
}


def counts(compiled: Any) -> Counts:
    """Returns the counts of what `jax.jit(...).lower(...).compile()` returned."""
    text = compiled.as_text() or ""
    cost = compiled.cost_analysis() or {}
    collectives: dict[str, int] = {}
    for name in _COLLECTIVE.findall(text):
        collectives[name] = collectives.get(name, 0) + 1
    header = text.partition("\n")[0]
    return Counts(
        bytes_accessed=float(cost.get("bytes accessed", 0.0)),
        flops=float(cost.get("flops", 0.0)),
        instructions=len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE)),
        collectives=collectives,
        aliases=len(re.findall(r"(?:may|must)-alias", header)),
        temporaries=int(compiled.memory_analysis().temp_size_in_bytes),
        misleading="; ".join(why for what, why in _MISLEADING.items() if re.search(what, text)),
    )


Measure = Callable[[argparse.Namespace], Iterator[Row]]


def main(
    doc: str,
    figures: Mapping[str, Figure],
    measure: Measure,
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    devices: int = 1,
    sizes: str = "leaves",
) -> None:
    """Runs one benchmark: prints its rows, and writes them where `--json` says.

    Args:
      doc: the docstring of the file.
      figures: what it declares.
      measure: yields a row or more of each.
      arguments: adds its options to a parser.
      environment: variables that have to be set before the process starts.
      devices: how many it needs; where there are fewer, it runs on virtual ones of the CPU.
      sizes: what `Row.size` counts.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--device", choices=PLATFORMS)
    parser.add_argument("--json", type=Path, help="file to write")
    if arguments:
        arguments(parser)
    options = parser.parse_args()

    wanted = {"JAX_PLATFORMS": PLATFORMS[options.device]} if options.device else {}
    wanted |= environment or {}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    if devices > 1:
        _ensure_devices(devices)

    records = []
    for row in measure(options):
        record = {
            "benchmark": Path(sys.argv[0]).stem,
            "sizes": sizes,
            **as_record(row, figures[row.figure]),
        }
        records.append(record)
        tqdm.write(row_line(record))
    if missing := figures.keys() - {record["figure"] for record in records}:
        raise SystemExit(f"not measured: {', '.join(sorted(missing))}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": records}, indent=1))


def _ensure_devices(number: int) -> None:
    """Makes virtual CPU devices where JAX has fewer devices than `number`."""
    jax.config.update("jax_num_cpu_devices", number)
    if jax.device_count() < number:
        jax.extend.backend.clear_backends()
        jax.config.update("jax_platforms", "cpu")


def as_record(row: Row, figure: Figure) -> dict[str, Any]:
    """Returns the row and its figure as JSON."""
    return {**dataclasses.asdict(figure), **dataclasses.asdict(row)}


def machine() -> dict[str, Any]:
    """Returns what the figures depend on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": sys.version.partition(" ")[0],
        "jax": jax.__version__,
    }


def label(record: Mapping[str, Any]) -> str:
    """Returns what two runs call the same row."""
    size = "" if record["size"] is None else f" ({record['size']:,})"
    return f"{record['benchmark']}: {record['figure']}{size}"


def verdict(record: Mapping[str, Any]) -> str:
    """Returns whether the limit is kept: `ok`, `OVER`, `?` where the spread has it, or nothing."""
    limit = record["limit"]
    if limit is None:
        return ""
    if record["ratio"] <= limit:
        return "ok"
    return "OVER" if record["low"] > limit else "?"


def amount(value: float, unit: str) -> str:
    """Returns a figure with its unit.

    Examples:
      >>> amount(0.0021, "s"), amount(3 * 2**20, "B"), amount(60_040, "lines"), amount(0.5, "")
      ('2.1 ms', '3.0 MiB', '60,040 lines', '0.5')
    """
    if unit == "s":
        scale, name = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
        return f"{value * scale:.3g} {name}"
    if unit == "B":
        power = min(3, max(0, (int(abs(value)).bit_length() - 1) // 10))
        return f"{value / 1024**power:,.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
    number = f"{value:,.0f}" if value == round(value) else f"{value:,.3g}"
    return f"{number} {unit}".rstrip()


def row_line(record: Mapping[str, Any]) -> str:
    """Returns one line of the table."""
    limit = "" if record["limit"] is None else f"{record['limit']:.2f}"
    spread = f"{record['low']:.2f} to {record['high']:.2f}"
    if record["low"] == record["high"]:
        spread = "once" if record["unit"] == "s" else "exact"
    return (
        f"{label(record):56} {record['peer']:36} {limit:>6} "
        f"{amount(record['ours'], record['unit']):>19} {record['ratio']:7.2f} {spread:>14} "
        f"{record['least']:7.2f} {verdict(record):>4}"
    )


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns all rows below a heading, and what they do not say below them."""
    head = (
        f"{'figure':56} {'peer':36} {'limit':>6} {'ours':>19} {'ratio':>7} {'spread':>14} "
        f"{'least':>7}"
    )
    notes = dict.fromkeys(f"{label(r)}: {r['note']}" for r in records if r["note"])
    return "\n".join([head, *map(row_line, records), *notes])
