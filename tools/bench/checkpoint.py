"""What a checkpoint costs: saving and restoring with digests against raw Orbax, without.

    hatch run dev:python tools/bench/checkpoint.py --megabytes 1024
    hatch run dev:python tools/bench/checkpoint.py --leaves 48 --shape 2048 2560

Both save and restore the same arrays in this process, in turn, on the same disk; what was written
is still in the page cache when it is read, and is deleted before the other writes, because the
second gigabyte in a cache costs more than the first. `memory` is the most that a call took beyond
what was there before it: the copies that Orbax makes are in it, and for a restore the arrays
themselves. On a virtual machine equal calls differ by a factor of three, by which pages of memory
they get from its host; hence the many rounds, and the fastest.

`stall` is how long training waits: one optimizer (Adam), two managers that stay open as in a run, a
save of each in turn. `call` is the processor's time of the calling thread and of the one that it
waits for; `until` that of the whole process until `save` returns, which includes what has begun in
the background; `all` that until the step is on the disk. Times of the processor hold on a busy
machine, where those of the clock do not.
"""

import argparse
import functools
import gc
import os
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import orbax.checkpoint as ocp
from _common import Figure, Row, counted, interleave, main, timed
from opt_checkpoint import LeafInfo, NamedState, Schema
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.digest import digests

SHAPE = (2048, 2048)
MEGABYTES = 16
STALL = ("call", "until", "all", "memory")
DTYPES = ("float32", "bfloat16", "int8")
RAW = "raw Orbax"
FIGURES = {
    **{name: Figure(RAW) for name in ("save", "restore")},
    **{f"{name}, processor": Figure(RAW) for name in ("save", "restore")},
    **{f"{name}, memory": Figure(RAW, None, "B") for name in ("save", "restore")},
    **{f"digests, {dtype}": Figure("NumPy's sum of the same bytes") for dtype in DTYPES},
    **{f"stall, {what}": Figure(RAW, None, "B" if what == "memory" else "s") for what in STALL},
}


@dataclass(frozen=True)
class Cost:
    """Of one call: seconds, seconds of all cores, and bytes beyond what was there."""

    wall: float
    cpu: float
    memory: int


def make_state(leaves: int) -> NamedState:
    """Random float32 arrays, as parameters are: they hardly compress."""
    keys = jax.random.split(jax.random.key(0), leaves)
    arrays = {f"params/w{i}": jax.random.normal(key, SHAPE) for i, key in enumerate(keys)}
    infos = (LeafInfo(("params", f"w{i}"), SHAPE, "float32", "params") for i in range(leaves))
    return NamedState(jax.block_until_ready(arrays), Schema(tuple(infos)))


def calls(named: NamedState, root: Path) -> tuple[dict[str, Callable[[], Any]], ...]:
    """Returns saving and restoring by raw Orbax, and by ours."""
    tree = dict(named)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )

    def raw_save() -> None:
        with ocp.CheckpointManager(root) as manager:
            manager.save(0, args=ocp.args.StandardSave(tree))

    def our_save() -> None:
        with Checkpointer(root) as checkpointer:
            checkpointer.save(0, named)

    def raw_restore() -> Any:
        with ocp.CheckpointManager(root) as manager:
            return manager.restore(0, args=ocp.args.StandardRestore(abstract))

    def our_restore() -> Any:
        with Checkpointer(root, read_only=True) as checkpointer:
            return checkpointer.at(0).read(abstract)

    return (
        {"save": raw_save, "restore": raw_restore},
        {"save": our_save, "restore": our_restore},
    )


def cost(call: Callable[[], Any]) -> Cost:
    """Returns what a call costs."""
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = memory("VmRSS")
    cpu, wall = processor(), time.perf_counter()
    result = jax.block_until_ready(call())
    spent = Cost(time.perf_counter() - wall, processor() - cpu, memory("VmHWM") - before)
    del result
    return spent


def memory(field: str) -> int:
    """Returns a figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def processor() -> float:
    """Returns the seconds that this process has had, all cores together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def throughput() -> Iterator[Row]:
    """Yields what digests cost, held against reading the same bytes once."""
    for dtype in DTYPES:
        x = jax.random.bits(jax.random.key(0), (4096, 8192), f"uint{8 * jnp.dtype(dtype).itemsize}")
        x = jax.block_until_ready(jax.lax.bitcast_convert_type(x, dtype))
        words = np.asarray(x).view(np.uint8).reshape(-1).view(np.uint64)
        times = interleave({"sum": words.sum, "digests": functools.partial(digests, [x])}, 6)
        yield timed(f"digests, {dtype}", times["digests"], times["sum"])


def save_and_restore(
    named: NamedState, rounds: int, folder: str | None
) -> dict[str, list[list[Cost]]]:
    """Returns the costs of (raw, ours) of every round after the first, by what was done."""
    found: dict[str, list[list[Cost]]] = {"save": [], "restore": []}
    for i in range(rounds + 1):
        sides = {}
        for side in (0, 1) if i % 2 else (1, 0):
            root = Path(tempfile.mkdtemp(dir=folder))
            try:
                sides[side] = {name: cost(call) for name, call in calls(named, root)[side].items()}
            finally:
                shutil.rmtree(root)
        if i:
            for name, costs in found.items():
                costs.append([sides[0][name], sides[1][name]])
    return found


@dataclass(frozen=True)
class Stall:
    """Of one save: seconds of the processor, and bytes beyond what was there."""

    call: float
    until: float
    all: float
    memory: int


def waited_for() -> float:
    """Returns the seconds of the processor of this thread, and of that which makes our saves."""
    makers = [t for t in threading.enumerate() if t.name.startswith("checkpointer")]
    mine = {thread.native_id for thread in (threading.current_thread(), *makers)}
    stats = (Path(f"/proc/self/task/{thread}/schedstat").read_text() for thread in mine)
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


def stall(save: Callable[[], Any], wait: Callable[[], Any]) -> Stall:
    """Returns what one save costs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    call, start = waited_for(), processor()
    save()
    call, until = waited_for() - call, processor() - start
    wait()
    return Stall(call, until, processor() - start, memory("VmHWM") - before)


def measure_stalls(
    leaves: int, shape: tuple[int, ...], rounds: int, folder: str | None
) -> dict[str, list[Stall]]:
    """Returns the costs of every save after the first two, by who saved."""
    keys = jax.random.split(jax.random.key(0), max(leaves // 3, 1))
    params = {f"layer_{i:05}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    optimizer = jax.block_until_ready(opt_optax_bridge.adam(1e-3).create(params))
    tree = {"params": optimizer.target, "state": optimizer.state.param_states}
    tree["step"] = optimizer.state.step
    root = Path(tempfile.mkdtemp(dir=folder))
    keep = ocp.CheckpointManagerOptions(max_to_keep=1)
    found: dict[str, list[Stall]] = {"raw": [], "ours": []}
    try:
        with (
            ocp.CheckpointManager(root / "raw", options=keep) as raw,
            Checkpointer(root / "ours", max_to_keep=1) as ours,
        ):
            args = ocp.args.StandardSave(tree)
            sides: dict[str, tuple[Callable[[int], Any], Callable[[], Any]]] = {
                "raw": (lambda step: raw.save(step, args=args), raw.wait_until_finished),
                "ours": (lambda step: ours.save(step, optimizer), ours.wait),
            }
            for i in range(rounds + 2):
                for side in ("raw", "ours") if i % 2 else ("ours", "raw"):
                    save, wait = sides[side]
                    cost = stall(functools.partial(save, i), wait)
                    if i > 1:
                        found[side].append(cost)
    finally:
        shutil.rmtree(root)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--megabytes", type=int, help="512, or 64 with --quick")
    parser.add_argument("--leaves", type=int, help="of a stall: 2000, or 200 with --quick")
    parser.add_argument("--shape", type=int, nargs="*", default=(16, 8), help="of those")
    parser.add_argument("--rounds", type=int, help="20, or 5 with --quick")
    parser.add_argument("--folder", help="on the disk to be measured")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of whole saves and restores, of digests, and of stalls."""
    quick = options.quick
    rounds = options.rounds or (5 if quick else 20)
    named = make_state((options.megabytes or (64 if quick else 512)) // MEGABYTES)
    for name, pairs in save_and_restore(named, rounds, options.folder).items():
        raw, ours = zip(*pairs, strict=True)
        yield timed(name, [c.wall for c in ours], [c.wall for c in raw])
        yield timed(f"{name}, processor", [c.cpu for c in ours], [c.cpu for c in raw])
        peaks = [max(c.memory for c in side) for side in (ours, raw)]
        yield counted(f"{name}, memory", *peaks)
    yield from throughput()

    leaves = options.leaves or (200 if quick else 2000)
    stalls = measure_stalls(leaves, tuple(options.shape), rounds, options.folder)
    for what in STALL:
        times = {side: [getattr(cost, what) for cost in costs] for side, costs in stalls.items()}
        if what == "memory":  # often none at all
            yield counted(f"stall, {what}", max(times["ours"]), max(times["raw"]), size=leaves)
        else:
            yield timed(f"stall, {what}", times["ours"], times["raw"], size=leaves)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
