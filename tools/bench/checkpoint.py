"""What a checkpoint costs: saving and restoring with digests next to raw Orbax, without.

    hatch run dev:bench --only checkpoint   # in TMPDIR, on the disk that is to be measured

One optimizer (Adam), two managers that stay open as in a run, a save and a restore of each in turn.
What was written is still in the page cache when it is read. On a virtual machine equal calls differ
by a factor of three, by which pages of memory they get from its host; hence the many rounds.

`stall` is the processor's time of the thread that saves and of the one that it waits for, which
holds on a busy machine; `on disk` is the clock's, until the step is there; `memory` is the most
that a save took beyond what was there before it, with the copies that Orbax makes.
"""

import functools
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import opt_optax_bridge
import orbax.checkpoint as ocp
from _common import Row, counted, seconds, timed
from opt_checkpoint import Checkpointer

RAW = "raw Orbax"


def memory(field: str) -> int:
    """Returns a figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def waited_for() -> float:
    """Returns the seconds of the processor of this thread, and of that which makes our saves."""
    makers = [t for t in threading.enumerate() if t.name.startswith("checkpointer")]
    mine = {thread.native_id for thread in (threading.current_thread(), *makers)}
    stats = (Path(f"/proc/self/task/{thread}/schedstat").read_text() for thread in mine)
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


def save(call: Callable[[], Any], wait: Callable[[], Any]) -> tuple[float, float, int]:
    """Returns seconds that the caller waits, seconds until all is written, and bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before, start = memory("VmRSS"), time.perf_counter()
    stalled = seconds(call, waited_for)
    wait()
    return stalled, time.perf_counter() - start, memory("VmHWM") - before


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows of many small leaves, and of few large ones."""
    sizes: list[tuple[int, tuple[int, int], float]] = [(200, (16, 8), 1.2)]
    if not quick:
        sizes = [(2_000, (16, 8), 1.2), (10_000, (16, 8), 1.2), (48, (2048, 2560), 1.15)]
    for leaves, shape, limit in sizes:
        yield from measure_size(leaves, shape, limit, 5 if quick else 20)


def measure_size(leaves: int, shape: Any, limit: float, rounds: int) -> Iterator[Row]:
    """Yields the rows of one size; parameters are random, and hardly compress."""
    keys = jax.random.split(jax.random.key(0), leaves // 3)
    params = {f"layer_{i:05}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    optimizer = jax.block_until_ready(opt_optax_bridge.adam(1e-3).create(params))
    tree = {"params": optimizer.target, "state": optimizer.state.param_states}
    tree["step"] = optimizer.state.step
    keep = ocp.CheckpointManagerOptions(max_to_keep=1)
    saves: dict[str, list[tuple[float, float, int]]] = {RAW: [], "ours": []}
    restores: dict[str, list[float]] = {RAW: [], "ours": []}
    with (
        tempfile.TemporaryDirectory() as root,
        ocp.CheckpointManager(Path(root) / "raw", options=keep) as raw,
        Checkpointer(Path(root) / "ours", max_to_keep=1) as ours,
    ):
        for i in range(rounds + 2):
            args: Any = {"save": ocp.args.StandardSave(tree), "get": ocp.args.StandardRestore(tree)}
            sides: dict[str, tuple[Callable[[], Any], ...]] = {
                RAW: (
                    functools.partial(raw.save, i, args=args["save"]),
                    raw.wait_until_finished,
                    functools.partial(raw.restore, i, args=args["get"]),
                ),
                "ours": (
                    functools.partial(ours.save, i, optimizer),
                    ours.wait,
                    functools.partial(ours.restore, i, optimizer),
                ),
            }
            for side in sorted(sides, reverse=bool(i % 2)):
                call, wait, restore = sides[side]
                saved, restored = save(call, wait), seconds(restore, time.perf_counter)
                if i > 1:
                    saves[side].append(saved)
                    restores[side].append(restored)
    for what, limited in (("stall", limit), ("on disk", None), ("memory", None)):
        index = ("stall", "on disk", "memory").index(what)
        mine, theirs = ([each[index] for each in saves[side]] for side in ("ours", RAW))
        if what == "memory":  # often none at all
            yield counted(f"save, {what}", max(mine), RAW, max(theirs), size=leaves)
        else:
            yield timed(f"save, {what}", mine, RAW, theirs, limit=limited, size=leaves)
    yield timed("restore", restores["ours"], RAW, restores[RAW], size=leaves)
