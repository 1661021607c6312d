"""The main job, `examples/train_lm.py`: in this process; slow tests run it as a user does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from opt_checkpoint import Checkpointer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAM = EXAMPLES / "train_lm.py"
STEPS, EVERY = 20, 8
TINY = [
    *("--layers=1", "--d-model=16", "--heads=2", "--batch-size=8", "--sequence-length=16"),
    *(f"--steps={STEPS}", f"--checkpoint-every={EVERY}", "--sample-bytes=20"),
    "--optimizer=adamw",
]
ENVIRONMENT = {
    # NPROC would give XLA more threads than a user's has: see `conftest.py`.
    **{k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "NPROC"))},
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "80",
}
sys.path.insert(0, str(EXAMPLES))


def load(module: str) -> Any:
    """A module of the example."""
    return importlib.import_module(module)


def popen(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"env": ENVIRONMENT, **options},
    )


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    with popen(*arguments, **options) as process:
        stdout, stderr = process.communicate(timeout=900)
    return subprocess.CompletedProcess([], process.returncode, stdout, stderr)


def run_until(step: int, number: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the program, and sends it a signal once that step is logged."""
    folder = Path(str(arguments[1]))
    with popen(*arguments) as process:
        while process.poll() is None and len(read_lines(folder)) < step:
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=900)
    return subprocess.CompletedProcess([], process.returncode, stdout, stderr)


def main(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What the program does, in this process; it has eight devices as well."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("COLUMNS", "80")
        code = load("train_lm").main(list(map(str, arguments)))
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def read_lines(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics without those that differ from run to run."""
    lines = map(json.loads, read_lines(folder))
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def steps(folder: Path) -> list[int]:
    return Checkpointer(folder / "checkpoints", read_only=True).steps()


def read_checkpoint(folder: Path) -> dict[str, bytes]:
    """Every bit of the latest checkpoint, where the data are included, by name."""
    saved = Checkpointer(folder / "checkpoints", read_only=True).latest_valid()
    assert saved is not None
    wanted = {leaf.name: leaf for leaf in saved.schema.leaves if leaf.kind != "extra"}
    read = saved.read(
        {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in wanted.items()}
    )
    return {
        **{name: np.asarray(leaf).tobytes() for name, leaf in read.items()},
        "extras": json.dumps(saved.read_extras()).encode(),
    }


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every path below a folder, with its size and when it was written."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def damage(step: Path) -> None:
    """Cuts off the second half of every file of a checkpoint."""
    for file in filter(Path.is_file, step.rglob("*")):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        lines = [f"def f{i}_{j}(x):\n    return {j % 7} * x + {i}\n" for j in range(20)]
        (folder / f"{i:02}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def compiled(text: Path, tmp_path_factory: pytest.TempPathFactory) -> jax.stages.Compiled:
    """The step of the run below, as the program compiles it: half of the time of all of it."""
    training = load("lm.training")
    steps: list[jax.stages.Compiled] = []

    def keep(*args: Any, original: Any = training.compile_step) -> None:
        steps.append(original(*args))
        raise training.UsageError("compiled")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "compile_step", keep)
        done = main("--out", tmp_path_factory.mktemp("compiled"), "--data", text, *TINY)
    assert done.stderr.endswith("train_lm: error: compiled\n")
    return steps[0]


@pytest.fixture(scope="module")
def trained(
    compiled: jax.stages.Compiled, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[], None]]:
    """The folder of a run that nothing interrupted, and what writes its report."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / "whole"
    training = load("lm.training")
    reports: list[Callable[[], None]] = []

    def keep(*args: Any, original: Any = training.write_report) -> None:
        reports.append(functools.partial(original, *args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "compile_step", lambda *_: compiled)
        patch.setattr(training, "write_report", keep)
        done = main("--out", folder, "--data", text, *TINY)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder, reports[0]


@pytest.fixture(scope="module")
def whole(trained: tuple[Path, Callable[[], None]]) -> Path:
    """The folder with all its files; what was printed is in `stdout` and `stderr`."""
    folder, report = trained
    with (folder / "stdout").open("a") as out, contextlib.redirect_stdout(out):
        report()
    return folder


@pytest.fixture
def to_resume(whole: Path, tmp_path: Path) -> Path:
    """A copy of it whose last checkpoint is damaged: what goes on does so four steps earlier."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    damage(folder / "checkpoints" / str(STEPS))
    return folder


@pytest.fixture
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what follows the training, and compiles programs of its own."""
    monkeypatch.setattr(load("lm.training"), "write_report", lambda *_: None)


def test_the_step_takes_over_the_memory_of_the_optimizer(compiled: jax.stages.Compiled) -> None:
    optimizer, *others = compiled.args_info[0]
    assert all(argument.donated for argument in jax.tree.leaves(optimizer))
    assert not any(argument.donated for argument in jax.tree.leaves(others))


def test_learning_rate_is_that_of_the_schedule(
    trained: tuple[Path, Callable[[], None]],
) -> None:
    rates = [line["learning_rate"] for line in read_metrics(trained[0])]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, STEPS // 20, STEPS, 4e-4)
    np.testing.assert_allclose(rates, schedule(jnp.arange(STEPS)), rtol=2e-6)


def test_a_run_leaves_all_its_files(whole: Path, text: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["data"] == [str(text)]
    assert (config["steps"], config["layers"], config["mesh"]) == (STEPS, 1, "data=4,model=2")
    metrics = read_metrics(whole)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
    for line in metrics:
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=1e-6)
        norms = [group["gradient"] for group in line["groups"].values()]
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-5)
        made = [group["update"] > 0 for group in line["groups"].values()]
        assert all(made) if line["learning_rate"] > 0 else not any(made)
    assert (whole / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert steps(whole) == [STEPS - EVERY - STEPS % EVERY, STEPS - STEPS % EVERY, STEPS]
    saved = read_checkpoint(whole)
    assert np.frombuffer(saved["state/step"], np.int32).tolist() == [STEPS]
    assert json.loads(saved["extras"]) == {"batches": {"key": 0, "position": STEPS}, "guard": []}
    assert not list(whole.glob(".*"))
    placement = (whole / "placement.txt").read_text()
    assert placement.startswith(
        "mesh data=4, model=2: 8 devices; state extended over data (ZeRO-1)"
    )
    assert re.search(r"\nas expected on 8 cpu devices: .*; \d+ warnings ", placement)  # of the CPU


def test_what_it_prints(whole: Path) -> None:
    stdout, stderr = (whole / "stdout").read_text(), (whole / "stderr").read_text()
    results = json.loads((whole / "results.json").read_text())
    bits = results["held_out_bits_per_byte"]
    assert list(bits) == ["transformer", "bigram", "unigram", "gzip"]
    for name, value in bits.items():
        assert f"  {name:<12}{value:6.3f}\n" in stdout
    assert results["sample"] in stdout
    # What is held is what was planned. Optax's AdamW splits no moment over data; ZeRO does.
    norms = 3 * 16
    elements = 2 * 256 * 16 + 4 * 16 * 16 + 2 * 64 * 16 + norms
    shared = 4 * (elements - norms) // 2 + 4 * norms  # all but norms are split over model=2
    counts = results["bytes_per_device"]
    state = counts["held"]["state"]
    assert counts["planned"] == counts["held"] == {"parameters": shared, "state": state}
    assert counts["plain Optax"] == {"parameters": shared, "state": 2 * shared + 4}
    assert state < 0.3 * 2 * shared
    said = f"Checked the compiled step: state sharded as asked, {state / 1024:.1f} KiB per device"
    assert said in " ".join(stdout.split())
    # No terminal, no bar: plain lines.
    assert "\r" not in stderr
    assert f"\nstep {STEPS}/{STEPS}  loss " in stderr


@pytest.mark.usefixtures("without_report")
def test_a_damaged_checkpoint_is_passed_over_and_made_again(
    whole: Path, to_resume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = main("--resume", to_resume)
    assert done.returncode == 0, done.stderr
    said = f"{to_resume} goes on from step {STEPS - STEPS % EVERY}: what was saved later is damaged"
    assert done.stdout.splitlines()[0] == said
    assert f"step {STEPS} is passed over: " in caplog.text
    assert read_metrics(to_resume) == read_metrics(whole)
    assert read_checkpoint(to_resume) == read_checkpoint(whole)


@pytest.mark.slow
def test_a_process_that_was_interrupted_and_killed_has_the_same_losses(
    text: Path, tmp_path: Path
) -> None:
    total, folder, whole = 60, tmp_path / "run", tmp_path / "whole"
    flags = ["--data", text, *TINY, f"--steps={total}", "--checkpoint-every=25"]
    done = run("--out", whole, *flags)
    assert done.returncode == 0, done.stderr
    config = json.loads((whole / "config.json").read_text())
    assert config["mesh"] == "data=4,model=2"  # virtual devices where there is only a CPU
    losses = [line["loss"] for line in read_metrics(whole)]
    assert np.mean(losses[-20:]) < 0.6 * losses[0]
    bits = json.loads((whole / "results.json").read_text())["held_out_bits_per_byte"]
    assert bits["transformer"] < bits["unigram"]

    made = 0
    for number, arguments in (
        (signal.SIGINT, ["--out", folder, *flags]),
        (signal.SIGTERM, ["--resume", folder]),
    ):
        done = run_until(made + 10, number, *arguments)
        assert done.returncode == 130, done.stderr
        assert "Traceback" not in done.stderr
        assert made + 10 <= len(read_lines(folder)) < total
        made = len(read_lines(folder))
        last = done.stdout.splitlines()[-1]
        assert last.startswith(f"Stopped after step {made}. ")
        assert last.endswith(f"Continue: hatch run dev:train --resume {folder}")
    run_until(made + 10, signal.SIGKILL, "--resume", folder)
    assert made < len(read_lines(folder)) < total
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # cut off in the middle of a line
    done = run("--resume", folder)
    assert done.returncode == 0, done.stderr
    assert read_metrics(folder) == read_metrics(whole)
    assert read_checkpoint(folder) == read_checkpoint(whole)
    results = [json.loads((f / "results.json").read_text()) for f in (folder, whole)]
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--weights=bfloat16-stochastic --state=8bit --optimizer=adamw", 4.48),
        ("--weights=bfloat16-kahan --state=bfloat16 --optimizer=adamw", 8.0),
        ("--layers=2", 12.0),  # Muon
    ],
)
def test_every_kind_of_state_is_sharded_saved_and_resumed(
    text: Path, tmp_path: Path, flags: str, said: float
) -> None:
    folder = tmp_path / "run"
    few = ["--layers=1", "--d-model=64", "--batch-size=8", "--sequence-length=16", "--steps=6"]
    few += ["--checkpoint-every=3", "--sample-bytes=5", "--data", str(text)]
    done = main("--out", folder, *few, *flags.split())
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert float(re.findall(r"(\S+) bytes per parameter", printed)[0]) <= said
    assert "state sharded as asked" in printed
    assert ("MuonState.mu" in printed) == ("adamw" not in flags)
    expected, metrics = read_checkpoint(folder), read_metrics(folder)
    damage(folder / "checkpoints" / "6")
    done = main("--resume", folder)
    assert done.returncode == 0, done.stderr
    assert read_checkpoint(folder) == expected
    assert read_metrics(folder) == metrics


# Bad command lines, and a part of what is said about each.
BAD = {
    "unknown flag": (["--stepps=3"], "--stepps"),
    "mesh and batch": (["--mesh=data=3,model=2"], "data=3 must divide --batch-size 8"),
    "microbatches": (
        ["--microbatches=4", "--mesh=data=4,model=2"],
        "4 x data=4 of --mesh must divide --batch-size 8",
    ),
    "no data": (["--data", "nowhere"], "nowhere: No such file"),
    "not empty": (["--out", "whole"], "whole is not empty"),
    "other width": (["--resume=whole", "--d-model=32"], "--d-model is 16 there, not 32"),
    "other text": (["--resume=other_text"], "is not, or no longer, the text"),
    "other checkpoint": (["--resume=other_checkpoint"], "of another configuration: 34 kept"),
    "damaged checkpoints": (["--resume=damaged"], "every checkpoint of damaged is damaged"),
    "no such process": (["--processes=2", "--process-id=2"], "--process-id must be from 0 to 1"),
    "no common folder": (["--processes=2", "--process-id=0"], "--processes needs --out"),
}


@pytest.fixture(scope="module")
def bad_world(text: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the bad command lines name."""
    world = tmp_path_factory.mktemp("bad")
    for name in "whole", "other_text", "other_checkpoint", "damaged":
        shutil.copytree(whole, world / name)
    shutil.copytree(text, world / "text")
    (world / "text" / "00.py").write_text("something else\n" * 50)
    config = json.loads((whole / "config.json").read_text())
    other_text = {**config, "data": [str(world / "text")]}
    (world / "other_text" / "config.json").write_text(json.dumps(other_text))
    (world / "other_checkpoint" / "config.json").write_text(json.dumps({**config, "layers": 2}))
    for step in (world / "damaged" / "checkpoints").glob("[0-9]*"):
        damage(step)
    return world


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2_and_writes_nothing(
    name: str, bad_world: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, said = BAD[name]
    is_new = not any(a.startswith("--resume") for a in arguments)
    before = snapshot(bad_world)
    monkeypatch.chdir(bad_world)
    done = main(*([f"--data={text}", *TINY] if is_new else []), *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("train_lm: error: ")
    assert said in last
    assert "Traceback" not in done.stderr
    assert snapshot(bad_world) == before


@pytest.mark.slow
def test_guarded_steps_are_skipped_and_the_average_is_evaluated(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first byte of 255 makes the loss of its row infinite."""
    training, kind = load("lm.training"), load("lm.data").Batches

    def planted_loss(
        model: Any, params: Any, windows: Any, of: Any = training.next_byte_loss
    ) -> Any:
        return jnp.where(windows[:, :1] == 255, jnp.inf, of(model, params, windows))

    def planted_batch(self: Any, of: Any = kind.__next__) -> Any:
        batch = np.array(of(self))
        if self.state()["position"] == 3:
            batch[5, 0] = 255
        return batch

    monkeypatch.setattr(training, "next_byte_loss", planted_loss)
    monkeypatch.setattr(training, "write_report", lambda *_: None)
    monkeypatch.setattr(kind, "__next__", planted_batch)
    flags = ["--steps=6", "--checkpoint-every=6", "--guard", "--average=0.9"]
    done = main("--out", tmp_path / "run", "--data", text, *TINY, *flags)
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path / "run")
    assert (metrics[2]["skipped"], metrics[2]["reason"]) == (8, "nonfinite")
    assert [line.get("loss") is None for line in metrics] == [n == 2 for n in range(6)]
    held_out = metrics[-1]["held_out"]
    assert math.isfinite(held_out["average"])
    assert held_out["average"] != held_out["trained"]


def test_a_run_of_which_everything_is_skipped_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = load("lm.training")
    config = training.Config(steps=100, batch_size=8, checkpoint_every=100)
    job = SimpleNamespace(config=config, shard=lambda batch: batch)
    start = SimpleNamespace(state=SimpleNamespace(step=0))
    made: list[int] = []

    def step(optimizer: Any, batch: int, _: object) -> tuple[Any, dict[str, Any]]:
        made.append(batch)
        return optimizer, {"loss": 0.0, "skipped": 0.0 if batch == 5 else 8.0}

    monkeypatch.setattr(training, "numbers", lambda metrics: metrics | {"grad_norm": math.inf})
    folder = training.RunFolder(tmp_path)
    with pytest.raises(
        training.UsageError, match=r"20 batches in a row .*up to step 25: take a lower --le"
    ):
        training.train(job, folder, step, start, iter(range(1, 100)), {})
    assert made == list(range(1, 26))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in read_lines(tmp_path)]
    assert lines[4]["grad_norm"] is None


class Numbers:
    """Batches that are their numbers."""

    def __init__(self) -> None:
        self._last = 0

    def __next__(self) -> int:
        self._last += 1
        return self._last

    def state(self) -> dict[str, int]:
        return {"position": self._last}


def test_a_run_that_a_step_has_spoilt_goes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 15 moves the parameters far away, where no loss is finite; no window is full by then."""
    training = load("lm.training")
    config = training.Config(steps=60, batch_size=8, checkpoint_every=100)
    job = SimpleNamespace(config=config, shard=lambda batch: batch)

    def update(optimizer: Any, grads: Any) -> Any:
        return optimizer.apply_gradient(grads)

    @jax.jit
    def jitted(optimizer: Any, batch: Any, state: Any) -> Any:
        weight = optimizer.target["w"]
        loss = jnp.where(abs(weight).max() < 1e3, jnp.mean(weight**2), jnp.nan)
        grads = {"w": jnp.where(batch == 15, 1e6, 2 * weight)}
        after, state = training.guarded_step(optimizer, update, state, grads, loss)
        return after, {"guard": state, "loss": loss}

    def step(optimizer: Any, batch: int, _: object, state: Any) -> Any:
        return jitted(optimizer, batch, state)

    optimizer = opt.sgd(0.05).create({"w": jnp.ones(2)})
    start = training.guarded(optimizer, update).init(optimizer.target)
    batches = Numbers()
    folder = training.RunFolder(tmp_path)
    done, is_finished = training.train(job, folder, step, optimizer, batches, {}, start)
    assert is_finished
    assert int(done.state.step) == 60
    # Ten steps up to the one that is held; skipped up to 35; then one for each batch.
    np.testing.assert_allclose(done.target["w"], 0.9 ** (10 + 60 - 35), rtol=1e-5)
    lines = {line["step"]: line for line in map(json.loads, read_lines(tmp_path))}
    assert lines[35]["back_to"] == 10
    assert {number for number, line in lines.items() if "skipped" in line} == {*range(16, 35)}
    assert "20 batches in a row were skipped by --guard: back to step 10" in capsys.readouterr().err


# Which devices it takes, and what a device has memory for.


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh is chosen by."""

    platform: str
    process_index: int = 0
    id: int = 0


def make(platform: str, *counts: int) -> list[Device]:
    """Devices of several processes, mixed as an interconnect may have them."""
    pairs = [(i, process) for process, count in enumerate(counts) for i in range(count)]
    return [Device(platform, process, i) for i, process in sorted(pairs)]


@pytest.mark.parametrize(
    ("platform", "counts", "flags", "mesh"),
    [
        ("gpu", (3,), {}, "data=2,model=1"),
        ("cpu", (8,), {}, "data=4,model=2"),
        ("gpu", (8,), {"batch_size": 2}, "data=2,model=4"),
        ("tpu", (4, 4, 4, 4), {}, "data=8,model=2"),
        ("gpu", (4, 4), {"mesh": "data=2,model=1"}, "data=2,model=1"),
    ],
)
def test_devices_that_are_taken(
    platform: str, counts: tuple[int, ...], flags: dict[str, Any], mesh: str
) -> None:
    devices = load("lm.devices")
    config, taken = devices.choose_devices(devices.Config(**flags).check(), make(platform, *counts))
    assert config.mesh == mesh
    data, model = config.mesh_shape
    assert len(set(taken)) == len(taken) == data * model
    shares = Counter(device.process_index for device in taken)
    assert shares == dict.fromkeys(range(len(counts)), data * model // len(counts))


def test_a_mesh_that_does_not_fit_is_one_line() -> None:
    devices = load("lm.devices")
    config = devices.Config(mesh="data=4,model=2")
    with pytest.raises(
        devices.UsageError, match="takes 8 devices, and there are 2 gpu devices; --"
    ):
        devices.choose_devices(config, make("gpu", 2))
    with pytest.raises(devices.UsageError, match="no mesh of 3 gpu devices in 3 processes divides"):
        devices.choose_devices(devices.Config(mesh=""), make("gpu", 1, 1, 1))


def test_what_a_device_has_no_memory_for_is_refused() -> None:
    memory = load("lm.memory")
    config = load("lm.config").Config(mesh="data=1,model=1", sequence_length=1024)
    plan = SimpleNamespace(total_bytes_per_device=960_000_000)

    def check(stats: dict[str, int] | None) -> None:
        gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
        mesh = SimpleNamespace(local_devices=[gpu] * 2)
        memory.check_memory(SimpleNamespace(config=config, mesh=mesh), plan)

    check(None)
    check({"bytes_limit": 2**40})
    with pytest.raises(
        memory.UsageError, match=r"takes at least 1.2 GiB, and .* has 953.7 MiB: ta"
    ):
        check({"bytes_limit": 10**9})
