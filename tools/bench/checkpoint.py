"""What a checkpoint costs: saving and restoring with digests against raw Orbax, without.

    hatch run dev:python tools/bench/checkpoint.py --megabytes 1024

Both save and restore the same arrays in this process, in turn, on the same disk; what was written
is still in the page cache when it is read, and is deleted before the other writes, because the
second gigabyte in a cache costs more than the first. Rows are medians over the rounds in seconds,
their ratio, that of the fastest rounds and of the processor's time, and the most memory that a call
took beyond what was there before it: the copies that Orbax makes are in it, and for a restore the
arrays themselves. On a virtual machine equal calls differ by a factor of three, by which pages of
memory they get from its host; hence the many rounds, and the fastest.
"""

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from opt_checkpoint import LeafInfo, NamedState, Schema
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.digest import digests

SHAPE = (2048, 2048)
MEGABYTES = 16


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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", help="on the disk to be measured")
    options = parser.parse_args()

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
