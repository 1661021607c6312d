"""Programs that tests kill, and a server that starts them without importing JAX every time.

Run as a program, it reads jobs from stdin, one JSON object a line, and forks for each: before JAX
has any device or thread pool, so that a child is as good as a process of its own, and ends as one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import elastic_case
import jax
import numpy as np
from elastic_case import abstract, compile_step, create, make_mesh
from jax.experimental import multihost_utils
from opt_checkpoint import Checkpointer, plan_restore
from opt_checkpoint.errors import DamagedError, LeafError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILE_EVENTS = frozenset(
    {
        *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"),
        *("os.truncate", "os.chmod", "os.utime", "shutil.rmtree", "shutil.move"),
    }
)


def train(
    directory: str,
    events: str,
    *,
    steps: int,
    mesh: tuple[int, int] = (1, 1),
    async_save: bool = True,
    optimizer: str = "adamw",
    kill: tuple[int, int] | None = None,
    term: str = "die",
    **cluster: Any,
) -> int:
    """Goes on from the latest checkpoint, saves every step, and appends what happens to `events`.

    `kill` is a step, and the number of a file event while it is saved: SIGKILL at that event. At
    SIGTERM it dies, leaves at once by an exception (`'leave'`), or finishes the step (`'finish'`).
    """
    config, processes = map(importlib.import_module, ("lm.config", "lm.processes"))
    log = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(*words: object) -> None:
        os.write(log, f"{' '.join(map(str, words))}\n".encode())

    asked: list[int] = []
    if term == "finish":
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    elif term == "leave":
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    who = config.Cluster(**cluster)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", mesh[0] * mesh[1] // who.processes)
    with processes.together(who):
        devices = make_mesh(*mesh)
        definition = getattr(elastic_case, optimizer)()
        target = abstract(definition, devices)
        saved = Checkpointer(directory, read_only=True).latest_valid()
        trained = plan_restore(saved, target).apply() if saved else create(target)
        start = saved.read_extras()["position"] if saved else 0
        step = compile_step(target, devices)
        note("resumed", start)
        i = start - 1
        with contextlib.ExitStack() as stack:
            checkpointer = stack.enter_context(
                Checkpointer(directory, max_to_keep=2, async_save=async_save)
            )
            for i in range(start, steps):
                trained, loss = step(trained, i)
                note("loss", i + 1, float(loss).hex())
                checkpointer.wait()
                if i > start:
                    note("end", i)
                if kill and kill[0] == i + 1:
                    stack.enter_context(killed_at(kill[1], directory, note))
                note("begin", i + 1)
                checkpointer.save(i + 1, trained, extras={"position": i + 1})
                if asked:
                    break
            checkpointer.close()
        note("end", i + 1)
    return 128 + asked[0] if asked else 0


def damage(directory: str, events: str, **cluster: Any) -> int:
    """Saves steps 1 to 3, of which process 0 damages the last; writes what each process finds."""
    config, processes = map(importlib.import_module, ("lm.config", "lm.processes"))
    who = config.Cluster(**cluster)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    with processes.together(who):
        target = abstract(elastic_case.momentum(), make_mesh(2, 2), zero=True)
        add = jax.jit(
            lambda tree, n: jax.tree.map(lambda leaf: leaf + n.astype(leaf.dtype), tree),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target),
        )
        of_step = [add(create(target), np.int32(step)) for step in range(4)]
        found: dict[str, Any] = {"warnings": []}
        handler = logging.Handler()
        handler.emit = lambda record: found["warnings"].append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("opt_checkpoint").addHandler(handler)
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        with Checkpointer(directory) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, of_step[step], extras={"position": step})
            checkpointer.wait()
            try:
                checkpointer.save(4, of_step[0], extras={"position": jax.process_index()})
            except LeafError as error:
                found["different"] = str(error)
            checkpointer.wait()
        if jax.process_index() == 0:
            flip_a_bit(Path(directory) / "3")
        multihost_utils.sync_global_devices("damaged")
        shares: set[float] = set()
        reading: Any = importlib.import_module("opt_checkpoint._step")
        restore_arrays = reading.restore_arrays

        def counted(folder: Path, item: Any, restore_args: Any, *, is_partial: bool = True) -> Any:
            tree = restore_arrays(folder, item, restore_args, is_partial=is_partial)
            leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.shape == (16, 32)]
            shares.update(sum(s.data.size for s in x.addressable_shards) / x.size for x in leaves)
            return tree

        reading.restore_arrays = counted
        reader = Checkpointer(directory, read_only=True)
        restored = reader.restore_latest(target)
        found |= {"restored": reader.restored_step, "shares": sorted(shares)}
        pairs = zip(*map(jax.tree.leaves, (restored, of_step[2])), strict=True)
        found["is_exact"] = all(
            np.array_equal(a.data, b.data)
            for one, other in pairs
            for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True)
        )
        found["ok"] = [is_valid(reader, step) for step in (1, 2, 3)]
        Path(events).write_text(json.dumps(found))
    return 0


def is_valid(reader: Checkpointer, step: int) -> bool:
    """Whether every bit is as it was written."""
    try:
        reader.validate(step)
    except DamagedError:
        return False
    return True


def flip_a_bit(step: Path) -> None:
    """Damages the largest array of a step."""
    path = max(step.glob("leaves/**/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@contextlib.contextmanager
def killed_at(number: int, directory: str, note: Callable[..., None]) -> Iterator[None]:
    """Kills this process before it changes the files of a folder for the nth time, from 0."""
    seen: list[str] = []
    armed = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not armed or not (event in FILE_EVENTS or (event == "open" and _writes(args))):
            return
        if not any(os.fspath(a).startswith(directory) for a in args if isinstance(a, str | Path)):
            return
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(event)

    sys.addaudithook(hook)
    yield
    armed = False
    note("events", len(seen))


def _writes(args: tuple[Any, ...]) -> bool:
    """Whether the arguments of the audit event `open` are those of a file that is written."""
    _, mode, flags = args
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def example(*arguments: str) -> int:
    """Runs `examples/train_lm.py`."""
    return int(importlib.import_module("train_lm").main(arguments))


def serve() -> dict[str, Any] | None:
    """Starts a process for each job, and says how they end; returns the job in each of them."""
    for line in sys.stdin:
        request = json.loads(line)
        answer: int | None
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return dict(request)
        print(json.dumps(answer), flush=True)
    return None


def main() -> int:
    sys.path.insert(0, str(EXAMPLES))
    importlib.import_module("lm.processes")  # once, for all jobs
    job = serve()
    if job is None:
        return 0
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()  # where it hangs: `Worker.output`
    programs: dict[str, Callable[..., int]] = {"train": train, "damage": damage, "example": example}
    return programs[job["program"]](*job.get("args", ()), **job.get("options", {}))


if __name__ == "__main__":
    sys.exit(main())
