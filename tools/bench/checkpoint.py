"""What a checkpoint costs: saving and restoring with digests next to raw Orbax, without.

    hatch run dev:bench --only checkpoint   # in TMPDIR, on the disk that is to be measured

One optimizer (Adam), two managers that stay open as in a run, a save and a restore of each in turn.
What was written is still in the page cache when it is read. On a virtual machine equal calls differ
by a factor of three, by which pages of memory they get from its host; hence the many rounds.

`stall` is the processor's time of the thread that saves and of the one that it waits for, which
holds on a busy machine; `on disk` is the clock's, until the step is there.
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
from _common import Row, seconds, timed
from opt_checkpoint import Checkpointer

RAW, WHAT = "raw Orbax", ("save, stall", "save, on disk", "restore")


def waited_for() -> float:
    """Returns the seconds of the processor of this thread, and of that which makes our saves."""
    makers = [t for t in threading.enumerate() if t.name.startswith("checkpointer")]
    mine = {thread.native_id for thread in (threading.current_thread(), *makers)}
    stats = (Path(f"/proc/self/task/{thread}/schedstat").read_text() for thread in mine)
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows of many small leaves, and of few large ones."""
    sizes = [(200, (16, 8), 1.2, 5)]
    if not quick:  # a round of 10,000 leaves takes a minute and a half
        sizes = [(2_000, (16, 8), 1.2, 9), (10_000, (16, 8), 1.2, 5), (48, (2048, 2560), 1.15, 9)]
    for leaves, shape, limit, rounds in sizes:
        yield from measure_size(leaves, shape, limit, rounds)


def measure_size(leaves: int, shape: Any, limit: float, rounds: int) -> Iterator[Row]:
    """Yields the rows of one size; parameters are random, and hardly compress."""
    keys = jax.random.split(jax.random.key(0), leaves // 3)
    params = {f"layer_{i:05}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    optimizer = jax.block_until_ready(opt_optax_bridge.adam(1e-3).create(params))
    tree = {"params": optimizer.target, "state": optimizer.state.param_states}
    tree["step"] = optimizer.state.step
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    args: Any = ocp.args
    found: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory() as root,
        ocp.CheckpointManager(Path(root) / "raw", options=options) as raw,
        Checkpointer(Path(root) / "ours", max_to_keep=1) as ours,
    ):
        for i in range(rounds + 2):
            sides: dict[str, tuple[Callable[[], Any], ...]] = {
                RAW: (
                    functools.partial(raw.save, i, args=args.StandardSave(tree)),
                    raw.wait_until_finished,
                    functools.partial(raw.restore, i, args=args.StandardRestore(tree)),
                ),
                "ours": (
                    functools.partial(ours.save, i, optimizer),
                    ours.wait,
                    functools.partial(ours.restore, i, optimizer),
                ),
            }
            for side in sorted(sides, reverse=bool(i % 2)):
                save, wait, restore = sides[side]
                gc.collect()
                start = time.perf_counter()
                stalled = seconds(save, waited_for)
                wait()
                written = time.perf_counter() - start
                restored = seconds(restore, time.perf_counter)
                if i > 1:
                    for what, spent in zip(WHAT, (stalled, written, restored), strict=True):
                        found.setdefault(what, {}).setdefault(side, []).append(spent)
    for what, times in found.items():
        most = limit if what == WHAT[0] else None
        yield timed(what, times["ours"], RAW, times[RAW], limit=most, size=leaves)
