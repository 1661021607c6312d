"""Training that is killed at any moment, and continues from the last step that was saved.

As often as `docs/checkpoint-cases.md` asks for.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from elastic_case import abstract, assert_same_bits, bits, compile_step, create, make_mesh, momentum
from opt_checkpoint import Checkpointer

pytestmark = [pytest.mark.faults, pytest.mark.slow]

KILLS = 50
KILLS_OF_TWO = 4
CLEAN_EXITS = 60
HEARTBEAT = 5


HERE = Path(__file__).parent
LIMIT = 240.0  # seconds; far more than anything takes on a machine that is not overloaded


class Workers:
    """A server of processes; `close` ends it and whatever it has started."""

    def __init__(self, folder: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        self._folder = folder
        self._count = 0
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore:os.fork", HERE / "kill_worker.py"],
            env=kept | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, program: str, *args: object, **options: Any) -> Worker:
        """Starts a program of `kill_worker` in a process of its own."""
        self._count += 1
        log = self._folder / f"log-{self._count}"
        job = {"program": program, "args": list(map(str, args)), "options": options}
        return Worker(self.ask, int(self.ask(job | {"log": str(log)})), log)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


class Worker:
    """A process."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], pid: int, log: Path) -> None:
        self._ask, self._pid, self._log = ask, pid, log
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; `None` while it runs."""
        if self._code is None:
            self._code = self._ask({"wait": self._pid})
        return self._code

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)

    def until(self, done: Callable[[], bool], seconds: float = LIMIT) -> None:
        """Waits until something is so, or it has ended; one that hangs says where."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and not done():
            if time.monotonic() > deadline:
                self.kill(signal.SIGABRT)
                time.sleep(1.0)
                raise AssertionError(f"not within {seconds} s\n{self.output()}")
            time.sleep(0.02)

    def wait(self, seconds: float = LIMIT) -> int:
        self.until(lambda: False, seconds)
        code = self.poll()
        assert code is not None
        return code

    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def read_events(file: Path) -> list[list[str]]:
    """What a program noted, line by line."""
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def last_steps(events: list[list[str]]) -> tuple[int, int]:
    """The last step whose save has begun, and the last that is known to have ended."""
    begun = [int(e[1]) for e in events if e[0] == "begin"]
    ended = [int(e[1]) for e in events if e[0] == "end"]
    return max(begun, default=0), max(ended, default=0)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def pause(random_: random.Random, seconds: float) -> None:
    time.sleep(random_.uniform(0, seconds))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    started = Workers(tmp_path_factory.mktemp("logs"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def expected() -> Callable[[int], Mapping[str, Any]]:
    """Every bit of what the workers have after a step, if nothing disturbs them."""
    mesh = make_mesh(1, 1)
    target = abstract(momentum(), mesh)
    step, optimizer = compile_step(target, mesh), create(target)
    found: list[Mapping[str, Any]] = []

    def of_step(number: int) -> Mapping[str, Any]:
        nonlocal optimizer
        while len(found) < number:
            optimizer, _ = step(optimizer, len(found))
            found.append(bits(optimizer))
        return found[number - 1]

    return of_step


def read_step(folder: Path, step: int) -> dict[str, Any]:
    """Every bit of a step, which has to be whole."""
    saved = Checkpointer(folder, read_only=True).at(step)
    assert saved.read_extras() == {"position": step}
    leaves = [leaf for leaf in saved.schema.leaves if leaf.kind != "extra"]
    read = saved.read({x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves})
    return {name: np.array(leaf) for name, leaf in read.items()}


def check_folder(folder: Path, expected: Callable[[int], Mapping[str, Any]]) -> list[int]:
    """Returns the steps that are listed; every one can be read and is exact."""
    checkpointer = Checkpointer(folder, read_only=True)
    steps = checkpointer.steps()
    for step in steps:
        assert_same_bits(read_step(folder, step), expected(step))
        checkpointer.validate(step)
    latest = checkpointer.latest_valid()
    assert (latest.step if latest else None) == (steps[-1] if steps else None)
    return steps


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_d1_killed_at_every_file_event_of_a_save(
    workers: Workers, expected: Callable[[int], Mapping[str, Any]], tmp_path: Path, mode: str
) -> None:
    """D1: SIGKILL at each file event that Python sees of one save, the oldest step's deletion too.

    The latest valid step is the one before or the new one, exact; so is every step that is listed.
    Saves in the background have the same events.
    """

    def run(name: str, event: int) -> tuple[int, Path, list[list[str]]]:
        folder, events = tmp_path / name, tmp_path / f"{name}.events"
        options = {"optimizer": "momentum", "async_save": mode == "async", "kill": (3, event)}
        code = workers.start("train", folder, events, steps=3, **options).wait()
        return code, folder, read_events(events)

    code, folder, events = run("whole", -1)
    assert code == 0
    assert check_folder(folder, expected) == [2, 3]
    number = next(int(e[1]) for e in events if e[0] == "events")
    assert number >= 20
    outcomes = []
    for event in range(number):
        code, folder, events = run(str(event), event)
        if code == 0 and mode == "async":
            continue  # other threads, another number of events
        assert code == -signal.SIGKILL
        assert last_steps(events) in ((3, 2), (2, 2))
        outcomes.append(check_folder(folder, expected))
        assert {tuple(steps) for steps in outcomes} <= {(1, 2), (1, 2, 3), (2, 3)}
    assert {steps[-1] for steps in outcomes} == {2, 3}
    # The next writer continues from there, and leaves no litter.
    code = workers.start("train", folder, tmp_path / "next", steps=4, optimizer="momentum").wait()
    assert code == 0
    assert check_folder(folder, expected) == [3, 4]
    assert not [path.name for path in folder.iterdir() if "tmp" in path.name]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_d2_killed_at_random(
    workers: Workers, expected: Callable[[int], Mapping[str, Any]], tmp_path: Path, mode: str
) -> None:
    """D2: random SIGKILLs, each process going on where the one before was killed.

    With saves that wait, and with saves in the background.
    """
    chance = random.Random(mode)
    folder, latest, in_saves = tmp_path / "run", 0, 0
    for i in range(KILLS):
        events = tmp_path / f"{i}.events"
        options = {"optimizer": "momentum", "async_save": mode == "async", "steps": 10_000}
        worker = workers.start("train", folder, events, **options)
        until_begun(worker, events, latest + chance.randint(1, 3))
        pause(chance, 0.2)
        worker.kill()
        assert worker.wait() == -signal.SIGKILL, worker.output()
        noted = read_events(events)
        assert noted[0] == ["resumed", str(latest)]
        begun, ended = last_steps(noted)
        in_saves += begun > ended
        steps = check_folder(folder, expected)
        found = steps[-1] if steps else 0
        assert max(ended, latest) <= found <= begun
        assert len(steps) <= 3
        latest = found
    assert latest > 0
    assert in_saves >= KILLS // 4


def until_begun(worker: Worker, events: Path, step: int) -> None:
    worker.until(lambda: last_steps(read_events(events))[0] >= step)


@pytest.mark.parametrize("term", ["die", "leave", "finish"])
def test_d6_sigterm_while_a_save_is_in_flight(
    workers: Workers,
    expected: Callable[[int], Mapping[str, Any]],
    tmp_path: Path,
    term: str,
) -> None:
    """D6: SIGTERM with a save in the background: all is there, or the exit code is not 0.

    A program that asks between two steps, and closes the checkpointer, finishes what it has begun.
    """
    folder, events = tmp_path / "run", tmp_path / "events"
    options: dict[str, Any] = {"steps": 10_000, "optimizer": "momentum", "term": term}
    worker = workers.start("train", folder, events, **options)
    until_begun(worker, events, 2)
    pause(random.Random(term), 0.1)
    worker.kill(signal.SIGTERM)
    code = worker.wait()
    begun, ended = last_steps(read_events(events))
    steps = check_folder(folder, expected)
    assert code == (-signal.SIGTERM if term == "die" else 128 + signal.SIGTERM)
    assert ended <= steps[-1] <= begun
    if term == "finish":
        assert steps[-1] == begun


def until_logged(worker: Worker, run: Path, count: int) -> None:
    worker.until(lambda: len(lines(run)) >= count)


def start_pair(workers: Workers, program: str, *args: Any, **options: Any) -> list[Worker]:
    """Starts two processes that meet at a port of their own; those of the example write in one."""
    where = f"localhost:{free_port()}"
    if program != "example":
        folder, events = args
        options |= {"processes": 2, "coordinator": where, "heartbeat_timeout": HEARTBEAT}
        return [
            workers.start(program, folder, f"{events}-{i}", process_id=i, **options)
            for i in range(2)
        ]
    flags = ["--processes=2", f"--coordinator={where}", f"--heartbeat-timeout={HEARTBEAT}"]
    return [workers.start(program, *args, *flags, f"--process-id={i}") for i in range(2)]


TINY = [
    *("--layers=1", "--d-model=16", "--heads=2", "--batch-size=8", "--sequence-length=16"),
    # Muon makes more of what the sums of other meshes round otherwise than 1e-5 of a loss.
    *("--steps=60", "--checkpoint-every=1", "--sample-bytes=20", "--optimizer=adamw"),
]


def test_d9_one_of_two_processes_is_killed_during_a_save(workers: Workers, tmp_path: Path) -> None:
    """D9: of two processes of the example, which save every step, one or the other is killed.

    The survivor is gone within two heartbeats. Two others go on from the last complete step, on
    other meshes too, and then one process alone: with the losses of a run that nothing disturbed.
    """
    (tmp_path / "text").write_text("def f(x):\n    return 3 * x + 1\n" * 100)
    whole, run = tmp_path / "whole", tmp_path / "run"
    data = f"--data={tmp_path / 'text'}"
    alone = workers.start("example", f"--out={whole}", data, *TINY, "--checkpoint-every=60")
    chance, made = random.Random(9), 0
    for kill in range(KILLS_OF_TWO):
        where = [f"--resume={run}"] if made else [f"--out={run}", data, *TINY]
        pair = start_pair(workers, "example", *where)
        victim, survivor = pair[kill % 2], pair[1 - kill % 2]
        until_logged(pair[0], run, made + 3)
        pause(chance, 0.1)
        victim.kill()
        assert victim.wait() == -signal.SIGKILL, victim.output()
        assert survivor.wait(2 * HEARTBEAT) != 0
        assert latest(run) > made
        made = latest(run)
    pair = start_pair(workers, "example", f"--resume={run}", "--mesh=data=2,model=2", "--zero")
    until_logged(pair[0], run, made + 3)
    pair[1].kill(signal.SIGTERM)  # one of them is asked
    assert [worker.wait() for worker in pair] == [130, 130], pair[0].output()
    made = latest(run)
    assert f"Stopped after step {made}. Continue:" in pair[0].output()
    assert "Stopped" not in pair[1].output()
    last = workers.start("example", f"--resume={run}", "--mesh=data=8,model=1", "--no-zero")
    assert last.wait() == 0, last.output()
    assert alone.wait() == 0, alone.output()
    found, uninterrupted = lines(run), lines(whole)
    assert [line["step"] for line in found] == list(range(1, 61))
    for one, other in zip(found, uninterrupted, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert (run / "results.json").exists()


def lines(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    text = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in text if line.endswith("\n")]


def latest(run: Path) -> int:
    found = Checkpointer(run / "checkpoints", read_only=True).latest_valid()
    return found.step if found else 0


def test_two_processes_resume_past_damage(workers: Workers, tmp_path: Path) -> None:
    """Each reads its own share; all agree about what is whole."""
    pair = start_pair(workers, "damage", tmp_path / "run", tmp_path / "found")
    assert [worker.wait() for worker in pair] == [0, 0], pair[0].output()
    for i in range(2):
        found = json.loads((tmp_path / f"found-{i}").read_text())
        assert "the processes would save different things" in found["different"]
        assert found["restored"] == 2
        assert {warning.partition(":")[0] for warning in found["warnings"]} == {
            "step 3 is passed over"
        }
        assert found["is_exact"]
        assert found["shares"] == [0.5, 1.0]  # of what is split over the processes, and is not
        assert found["ok"] == [True, True, False]


def test_d10_two_processes_end_without_hanging(workers: Workers, tmp_path: Path) -> None:
    """D10: clean exits of two processes: after a barrier and `jax.distributed.shutdown()`."""
    for i in range(CLEAN_EXITS):
        options = {"mesh": (2, 2), "steps": 1, "optimizer": "momentum"}
        pair = start_pair(workers, "train", tmp_path / f"{i}", tmp_path / f"{i}.events", **options)
        assert [worker.wait(120) for worker in pair] == [0, 0], pair[0].output()
