"""What a checkpoint costs: saving and restoring with digests against raw Orbax, without.

    hatch run dev:python tools/bench/checkpoint.py --megabytes 1024
    hatch run dev:python tools/bench/checkpoint.py --stall --leaves 10000 --shape 16 8
    hatch run dev:python tools/bench/checkpoint.py --stall --leaves 48 --shape 2048 2560

Both save and restore the same arrays in this process, in turn, on the same disk; what was written
is still in the page cache when it is read, and is deleted before the other writes, because the
second gigabyte in a cache costs more than the first. Rows are medians over the rounds in seconds,
their ratio, that of the fastest rounds and of the processor's time, and the most memory that a call
took beyond what was there before it: the copies that Orbax makes are in it, and for a restore the
arrays themselves. On a virtual machine equal calls differ by a factor of three, by which pages of
memory they get from its host; hence the many rounds, and the fastest.

`--stall` measures how long training waits: one optimizer (Adam), two managers that stay open as in
a run, a save of each in turn. "call" is the processor's time of the calling thread and of the one
that it waits for; "until" that of the whole process until `save` returns, which includes what has
begun in the background; "all" that until the step is on the disk. Times of the processor hold on a
busy machine, where those of the clock do not.
"""

import argparse
import gc
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge
import orbax.checkpoint as ocp
from opt_checkpoint import LeafInfo, NamedState, Schema
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.digest import digests

SHAPE = (2048, 2048)
MEGABYTES = 16
STALL = ("call", "until", "all", "memory")


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
    Path("/proc/self/clear_refs").write_text("5")  # The high-water mark starts anew.
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


def throughput() -> Mapping[str, float]:
    """Returns how fast digests are computed, in GiB/s, by dtype."""
    found = {}
    for dtype in ("float32", "bfloat16", "int8"):
        x = jax.random.bits(jax.random.key(0), (8192, 8192), f"uint{8 * jnp.dtype(dtype).itemsize}")
        x = jax.block_until_ready(jax.lax.bitcast_convert_type(x, dtype))
        times = []
        for _ in range(6):
            start = time.perf_counter()
            digests([x])
            times.append(time.perf_counter() - start)
        found[dtype] = x.nbytes / 2**30 / min(times)
    return found


def measure(named: NamedState, rounds: int, folder: str | None) -> dict[str, list[list[Cost]]]:
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
                    cost = stall(partial(save, i), wait)
                    if i > 1:
                        found[side].append(cost)
    finally:
        shutil.rmtree(root)
    return found


def print_stalls(found: dict[str, list[Stall]]) -> None:
    """Prints medians, and the ratios of ours to raw Orbax."""
    medians = {
        side: [statistics.median(getattr(cost, name) for cost in costs) for name in STALL]
        for side, costs in found.items()
    }
    print(f"{'':6} {'call s':>8} {'until s':>8} {'all s':>8} {'memory MB':>10}")
    for side, (call, until, whole, size) in medians.items():
        print(f"{side:6} {call:8.3f} {until:8.3f} {whole:8.3f} {size / 2**20:10.1f}")
    ratios = [ours / max(raw, 1e-9) for raw, ours in zip(*medians.values(), strict=True)]
    print("ratio  " + " ".join(f"{r:{w}.2f}" for r, w in zip(ratios, (8, 8, 8, 10), strict=True)))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--stall", action="store_true", help="how long training waits")
    parser.add_argument("--leaves", type=int, default=2000)
    parser.add_argument("--shape", type=int, nargs="*", default=(16, 8))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", help="on the disk to be measured")
    options = parser.parse_args()
    if options.stall:
        print(f"{options.leaves} leaves of {list(options.shape)}, jax {jax.__version__}")
        shape = tuple(options.shape)
        print_stalls(measure_stalls(options.leaves, shape, options.rounds, options.folder))
        return

    named = make_state(options.megabytes // MEGABYTES)
    found = measure(named, options.rounds, options.folder)
    print(f"{options.megabytes} MB in leaves of {MEGABYTES} MB, jax {jax.__version__}")
    speeds = ", ".join(f"{dtype} {speed:.1f}" for dtype, speed in throughput().items())
    print(f"digests, GiB/s: {speeds}")
    print(
        f"{'':8} {'raw s':>7} {'ours s':>7} {'ratio':>6} {'fastest':>8} {'cpu':>6} "
        f"{'raw MB':>8} {'ours MB':>8}"
    )
    for name, pairs in found.items():
        raw, ours = zip(*pairs, strict=True)
        walls = [statistics.median(c.wall for c in side) for side in (raw, ours)]
        fastest = [min(c.wall for c in side) for side in (raw, ours)]
        cpu = [statistics.median(c.cpu for c in side) for side in (raw, ours)]
        peaks = [max(c.memory for c in side) / 2**20 for side in (raw, ours)]
        print(
            f"{name:8} {walls[0]:7.2f} {walls[1]:7.2f} {walls[1] / walls[0]:6.2f} "
            f"{fastest[1] / fastest[0]:8.2f} {cpu[1] / cpu[0]:6.2f} {peaks[0]:8.0f} {peaks[1]:8.0f}"
        )


if __name__ == "__main__":
    main()
