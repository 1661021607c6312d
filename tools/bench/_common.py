"""What the benchmarks of this folder share: rows of one table, interleaved timing, counts.

A benchmark is a file here that yields rows, and says in `DEVICES` how many it needs, if not one:

    def measure(quick: bool) -> Iterator[Row]:  # `quick`: small shapes, few rounds
        times = interleave({"raw Optax": theirs, "ours": ours}, rounds=7)
        yield timed("trace", times["ours"], "raw Optax", times["raw Optax"], limit=1.1, size=1000)
        yield counted("bytes", our_bytes, "raw Optax", their_bytes, limit=1.0)

Ours and the peer always run in one process, in turn.
"""

import contextlib
import dataclasses
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Row:
    """A figure, measured once; as text it is a line of the table.

    Attributes:
      figure: what was measured.
      peer: what ours is held against.
      ours: the median, in seconds, or a count.
      ratio: of ours to the peer's in the same round, the median over rounds.
      low: the lower quartile of those ratios.
      high: the upper quartile.
      limit: the highest ratio that is still as claimed; `None` where none is.
      size: the number of leaves, or of whatever else grows.
      note: what the figure does not say.
    """

    figure: str
    peer: str
    ours: float
    ratio: float
    low: float
    high: float
    limit: float | None = None
    size: int | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the limit is kept: `ok`, `OVER`, `?` where the spread has it, or nothing."""
        if self.limit is None:
            return ""
        return "ok" if self.ratio <= self.limit else "OVER" if self.low > self.limit else "?"

    def __str__(self) -> str:
        figure = self.figure if self.size is None else f"{self.figure} ({self.size:,})"
        spread = "exact" if self.low == self.high else f"{self.low:.2f} to {self.high:.2f}"
        limit = "" if self.limit is None else f"limit {self.limit:.4g} {self.verdict}"
        ours = f"{self.ours:,.0f}" if self.ours == round(self.ours) else f"{self.ours:,.4g}"
        return (
            f"  {figure:50} {ours:>12} = {self.ratio:6.2f} x {self.peer:30} {spread:15} "
            f"{limit:16} {self.note}"
        ).rstrip()


def timed(
    figure: str, ours: Sequence[float], peer: str, theirs: Sequence[float], **rest: Any
) -> Row:
    """Returns the row of two series of times that were taken in turn."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Row(figure, peer, statistics.median(ours), middle, low, high, **rest)


def counted(figure: str, ours: float, peer: str, theirs: float, **rest: Any) -> Row:
    """Returns the row of two counts, which have no spread."""
    ratio = ours / theirs if theirs else float("inf") if ours else 1.0
    return Row(figure, peer, ours, ratio, ratio, ratio, **rest)


def seconds(call: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Returns how long one call takes, its arrays ready."""
    start = clock()
    jax.block_until_ready(call())
    return clock() - start


def on_accelerator() -> bool:
    """Whether steps run on a GPU or TPU: shapes are larger there, and the processor waits."""
    return jax.default_backend() != "cpu"


def interleave(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    clock: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Times every call once a round, each round beginning with another one.

    A first round is thrown away. Garbage is collected between rounds, not in them. `process_time`
    counts the seconds of all cores and is what a busy machine disturbs least; `thread_time` counts
    those of the caller alone, as a dispatch takes; `perf_counter` is for what waits. By default the
    first on a CPU, the last elsewhere.
    """
    clock = clock or (time.perf_counter if on_accelerator() else time.process_time)
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what exists now is not looked through in each of hundreds of rounds
    try:
        for i in range(-1, rounds):
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


def optax_step(tx: Any) -> Callable[..., Any]:
    """Returns one step of a transformation: `(params, state, grads) -> (params, state)`."""

    def step(params: Any, state: Any, grads: Any, **rest: Any) -> Any:
        updates, state = tx.update(grads, state, params, **rest)
        return optax.apply_updates(params, updates), state

    return step


class Runner:
    """A compiled step that owns its parameters and state, which it donates and returns."""

    def __init__(self, step: Callable[..., Any], params: Any, state: Any, *rest: Any) -> None:
        self.carried = jax.tree.map(jnp.copy, (params, state))
        self.rest = rest
        jitted = jax.jit(step, donate_argnums=(0, 1))
        self.compiled: Any = jitted.lower(*self.carried, *rest).compile()

    def __call__(self) -> Any:
        """Makes one step."""
        self.carried = self.compiled(*self.carried, *self.rest)
        return self.carried


_COLLECTIVE = re.compile(
    r"\s(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


class Counts:
    """What a compiled program consists of.

    Attributes:
      bytes: that XLA says are read and written.
      flops: floating-point operations, by XLA.
      instructions: of the optimised program, those inside of fusions included.
      collectives: how many of them are collectives.
      aliases: results that take over the memory of an argument.
      temporaries: bytes held besides arguments and results.
      note: where the first two are not what the program does.
    """

    def __init__(self, compiled: Any) -> None:
        text = compiled.as_text() or ""
        cost = compiled.cost_analysis() or {}
        self.bytes = float(cost.get("bytes accessed", 0.0))
        self.flops = float(cost.get("flops", 0.0))
        self.instructions = len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))
        self.collectives = len(_COLLECTIVE.findall(text))
        self.aliases = len(re.findall(r"(?:may|must)-alias", text.partition("\n")[0]))
        self.temporaries = int(compiled.memory_analysis().temp_size_in_bytes)
        # XLA counts the body of a loop once and, of a `cond`, the dearest branch.
        is_misleading = re.search(r"\s(?:while|conditional|dynamic-(?:update-)?slice)\(", text)
        self.note = "with loops, branches or slices, which XLA miscounts" if is_misleading else ""
