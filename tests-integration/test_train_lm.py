"""The main job, `examples/train_lm.py`, as a user runs it: in a process of its own."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
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
STEPS = 220
TINY = [
    *("--layers=1", "--d-model=16", "--heads=2", "--batch-size=8", "--sequence-length=16"),
    *(f"--steps={STEPS}", "--checkpoint-every=40", "--sample-bytes=20", "--optimizer=adamw"),
]
ENVIRONMENT = {
    # NPROC would give XLA more threads than a user's has: see `conftest.py`.
    **{k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "NPROC"))},
    "JAX_PLATFORMS": "cpu",
    "COLUMNS": "80",
    # Most of these processes compile the same programs; those that are killed compile none then.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
GROUPS = ["embedding", "vectors", "matrices"]
PNG = b"\x89PNG\r\n\x1a\n"


def popen(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    with popen(*arguments, **options) as process:
        stdout, stderr = process.communicate(timeout=300)
    return subprocess.CompletedProcess(
        list(map(str, arguments)), process.returncode, stdout, stderr
    )


def run_until(step: int, number: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the program, and sends it a signal once that step is logged."""
    folder = Path(str(arguments[1]))
    with popen(*arguments) as process:
        while process.poll() is None and len(read_lines(folder)) < step:
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=300)
    return subprocess.CompletedProcess(
        list(map(str, arguments)), process.returncode, stdout, stderr
    )


def read_lines(folder: Path) -> list[str]:
    file = folder / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics without those that differ from run to run; of groups, by path."""
    lines = [flatten(json.loads(line)) for line in read_lines(folder)]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def flatten(line: dict[str, Any]) -> dict[str, float]:
    leaves = jax.tree_util.tree_leaves_with_path(line)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


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


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def schedule(count: int, peak: float = 4e-3) -> float:
    """The learning rate of the update after `count` others, by hand."""
    warm_up = STEPS // 20
    if count < warm_up:
        return peak * count / warm_up
    passed = (count - warm_up) / (STEPS - warm_up)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * passed)))


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    ENVIRONMENT["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        lines = [f"def f{i}_{j}(x):\n    return {j % 7} * x + {i}\n" for j in range(20)]
        (folder / f"{i:02}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted; its output is in `stdout` and `stderr`."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / "whole"
    done = run("--out", folder, "--data", text, *TINY)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture(scope="module")
def interrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped by Ctrl-C."""
    folder = tmp_path_factory.mktemp("runs") / "interrupted"
    done = run_until(20, signal.SIGINT, "--out", folder, "--data", text, *TINY)
    assert done.returncode == 130, done.stderr
    steps = len(read_lines(folder))
    assert 20 <= steps < STEPS
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"Stopped after step {steps}. ")
    assert last.endswith(f"Continue: hatch run dev:train --resume {folder}")
    assert "Traceback" not in done.stderr
    return folder


def test_a_run_leaves_all_its_files(whole: Path, text: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    assert config["data"] == [str(text)]
    assert (config["steps"], config["layers"], config["mesh"]) == (STEPS, 1, "data=4,model=2")
    assert [line["step"] for line in read_metrics(whole)] == list(range(1, STEPS + 1))
    for line in (flatten(json.loads(line)) for line in read_lines(whole)):
        assert all(math.isfinite(value) for value in line.values())
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=1e-6)
        assert line["grad_norm"] > 0
        norms = [line[f"groups/{name}/gradient"] for name in GROUPS]
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-5)
        made = [line[f"groups/{name}/update"] > 0 for name in GROUPS]
        assert all(made) if line["learning_rate"] > 0 else not any(made)
        assert line["tokens_per_s"] > 0
    png = (whole / "plot.png").read_bytes()
    assert png.startswith(PNG)
    assert png[-8:-4] == b"IEND"
    assert len(png) > 10_000
    assert steps(whole) == [STEPS - 40 - STEPS % 40, STEPS - STEPS % 40, STEPS]
    saved = read_checkpoint(whole)
    assert np.frombuffer(saved["state/step"], np.int32).tolist() == [STEPS]
    assert json.loads(saved["extras"]) == {"batches": {"key": 0, "position": STEPS}, "guard": []}
    assert not list(whole.glob(".*"))
    placement = (whole / "placement.txt").read_text()
    title = "mesh data=4, model=2: 8 devices; state extended over data (ZeRO-1)\n"
    assert placement.startswith(title)
    assert re.search(r"\nas expected on 8 cpu devices: .*; \d+ warnings ", placement)  # of the CPU
    assert "\ncollectives, per device and step\n" in placement


def test_what_it_prints(whole: Path) -> None:
    stdout, stderr = (whole / "stdout").read_text(), (whole / "stderr").read_text()
    results = json.loads((whole / "results.json").read_text())
    bits = results["held_out_bits_per_byte"]
    assert list(bits) == ["transformer", "bigram", "unigram", "gzip"]
    for name, value in bits.items():
        assert f"  {name:<12}{value:6.3f}\n" in stdout
    assert results["sample"].startswith("def ")
    assert results["sample"] in stdout
    assert bits["transformer"] < bits["unigram"]
    # What a device will hold comes first, then what the step does with it.
    table, norms = 256 * 16, 3 * 16
    elements = 2 * table + 4 * 16 * 16 + 2 * 64 * 16 + norms
    shared = 4 * (elements - 3 * 16) // 2 + 4 * 3 * 16  # all but norms are split over model=2
    upto_sample = stdout.partition("\nSample\n")[0].splitlines()
    assert all(len(line) <= 80 for line in upto_sample if str(whole) not in line)
    # What does not fit into a line goes on below, four columns to the right.
    lines = re.sub(r"\n {4}(?: {2})?(?=\S)", " ", "\n".join(upto_sample)).splitlines()
    aim, folder, *lines = lines
    described = [line.split() for line in lines[:5]]
    parts, fields, groups, together, *notes, checked, sent = lines[5:]
    assert aim.startswith("Trains a byte-level language model, then compares ")
    assert folder.startswith(f"{whole}: {elements:,} parameters on data=4,model=2, ")
    # Adafactor does not factor so small a table; in three slots it has placeholders. Two counters
    # count the updates of each AdamW, of the schedule and of the moments. ZeRO splits all but these
    # over data=4.
    rest = 3 * 4 + 4 * 4
    moments = ((shared - 2 * table) // 4, 4 * (elements - table))
    state = (2 * moments[0] + table // 2 + rest, 2 * moments[1] + 4 * table + rest)
    kib = [f"{count / 1024:.1f} KiB" for count in (shared, 4 * elements, *state, moments[0])]
    assert [line[0] for line in described] == ["group", *GROUPS, "total"]
    assert described[1][2:6] == ["1", f"{table:,}", "16.0", "KiB"]
    assert described[2][1:4] == ["'.*/(scale|bias)'", "3", f"{norms}"]
    assert "weight_decay=0.0" in described[2]
    assert described[3][2:4] == ["5", f"{elements - table - norms:,}"]
    assert parts == (
        f"Plan for each device: parameters {kib[0]} of {kib[1]}, gradients {kib[0]} of {kib[1]}, "
        f"state {kib[2]} of {kib[3]}"
    )
    assert fields.startswith("  state by field: ")
    assert f"ScaleByAdamState.mu {kib[4]}, ScaleByAdamState.nu {kib[4]}" in fields
    assert f"_AdafactorParamState.v {table / 2 / 1024:.1f} KiB" in fields
    assert [part.split()[-3] for part in groups.split(",")[:5]] == [
        *("attention", "embedding", "head", "mlp", "norm")
    ]
    assert together.startswith(f"  together {(2 * shared + state[0]) / 1024:.1f} KiB, ")
    assert all("stays replicated over data=4" in note for note in notes)
    said = f"Checked the compiled step: state sharded as asked, {kib[2]} a device"
    assert re.fullmatch(rf"{re.escape(said)}; warning: \d+ x gradient all-reduce", checked)
    assert re.match(r"  sent by a device in a step: \d+ all-reduce \S+ KiB, \d+ all-gather", sent)
    # What is held is what was planned; Optax's AdamW splits no moment over data.
    counts = results["bytes_per_device"]
    assert counts["planned"] == counts["held"] == {"parameters": shared, "state": state[0]}
    assert counts["plain Optax"] == {"parameters": shared, "state": 2 * shared + 4}
    for name in counts:
        row = next(line for line in stdout.splitlines() if line.startswith(f"  {name} "))
        assert len(row) <= 80
        assert kib[0] in row
    # No terminal, no bar: plain lines.
    assert "\r" not in stderr
    others = [line for line in stderr.splitlines() if not line.startswith("step ")]
    assert all(re.fullmatch(r".* \.\.\.( \d+%)?( \d+ s)?", line) for line in others)
    phases = [line for line in others if line.endswith("...")]
    assert phases == [
        *("Starting ...", "Finding the text and the devices ...", "Planning ..."),
        *("Compiling the training step ...", "Creating the optimizer ..."),
        *("Writing a sample ...", "Evaluating on held-out text ..."),
        "Evaluating simpler models, and drawing ...",
    ]
    lines = [line for line in stderr.splitlines() if line.startswith("step ")]
    shown = [int(re.match(r"step (\d+)/", line)[1]) for line in lines]  # type: ignore[index]
    assert shown == sorted(set(shown))
    assert (shown[0], shown[-1]) == (1, STEPS)
    assert lines[-1].startswith(f"step {STEPS}/{STEPS}  loss ")
    for word in "bits/byte", "lr", "|grad|", "tokens/s", "ETA":
        assert word in lines[-1]


def test_loss_falls_and_baselines_are_those_of_the_text(whole: Path, text: Path) -> None:
    losses = [line["loss"] for line in read_metrics(whole)]
    assert np.mean(losses[-20:]) < 0.6 * losses[0]
    bits = json.loads((whole / "results.json").read_text())["held_out_bits_per_byte"]
    files = sorted(text.iterdir())
    held_out = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 20 == 19)
    train = b"".join(f.read_bytes() for i, f in enumerate(files) if i % 20 != 19)
    assert bits["unigram"] == pytest.approx(count_unigram_bits(train, held_out))
    assert bits["bigram"] == pytest.approx(count_bigram_bits(train, held_out))


def test_learning_rate_is_that_of_the_schedule(whole: Path) -> None:
    rates = [line["learning_rate"] for line in read_metrics(whole)]
    assert rates[0] == 0
    assert max(rates) == np.float32(4e-3)
    np.testing.assert_allclose(rates, [schedule(i) for i in range(STEPS)], rtol=2e-6)


def test_a_run_that_was_killed_and_interrupted_has_the_same_losses(
    whole: Path, interrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    run_until(len(read_lines(folder)) + 60, signal.SIGKILL, "--resume", folder)
    before = len(read_lines(folder))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')  # cut off in the middle of a line
    assert before < STEPS
    done = run("--resume", folder)
    assert done.returncode == 0, done.stderr
    assert read_metrics(folder) == read_metrics(whole)
    assert read_checkpoint(folder) == read_checkpoint(whole)
    results = [json.loads((f / "results.json").read_text()) for f in (folder, whole)]
    assert results[0] == results[1]


def test_a_damaged_checkpoint_is_passed_over_and_made_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    *_, before, last = steps(whole)
    damage(folder / "checkpoints" / str(last))
    done = run("--resume", folder)
    assert done.returncode == 0, done.stderr
    said = f"{folder} goes on from step {before}: what was saved later is damaged\n"
    assert done.stdout.startswith(said)
    assert f"step {last} is passed over: " in done.stderr
    assert read_metrics(folder) == read_metrics(whole)
    assert read_checkpoint(folder) == read_checkpoint(whole)


@pytest.mark.parametrize(
    ("weights", "state", "each"),
    [
        pytest.param("bfloat16-stochastic", "8bit", 4.48, id="stochastic"),
        pytest.param("bfloat16-remainder", "8bit", 6.48, marks=pytest.mark.slow, id="remainder"),
        pytest.param("bfloat16-kahan", "bfloat16", 8.0, marks=pytest.mark.slow, id="kahan"),
        pytest.param("bfloat16", "float32", 10.0, marks=pytest.mark.slow, id="naive"),
    ],
)
def test_low_precision_is_sharded_saved_and_resumed(
    text: Path, tmp_path: Path, weights: str, state: str, each: float
) -> None:
    folder = tmp_path / "run"
    flags = ["--layers=1", "--d-model=64", "--batch-size=8", "--sequence-length=16"]
    flags += ["--optimizer=adamw"]
    flags += ["--steps=6", "--checkpoint-every=3", "--sample-bytes=5", "--data", str(text)]
    done = run("--out", folder, f"--weights={weights}", f"--state={state}", *flags)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"(\S+) bytes a\s+parameter", done.stdout)[0]) <= each
    assert "state sharded as asked" in done.stdout
    check_that_it_goes_on(folder)


def test_muon_is_planned_sharded_saved_and_resumed(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ["--layers=2", "--d-model=32", "--batch-size=8", "--sequence-length=16"]
    flags += ["--steps=6", "--checkpoint-every=3", "--sample-bytes=5", "--data", str(text)]
    done = run("--out", folder, *flags)
    assert done.returncode == 0, done.stderr
    assert "MuonState.mu" in done.stdout
    assert "state sharded as asked" in done.stdout
    check_that_it_goes_on(folder)


def check_that_it_goes_on(folder: Path) -> None:
    """A run of six steps whose last checkpoint is damaged makes them again, the same."""
    expected, metrics = read_checkpoint(folder), read_metrics(folder)
    damage(folder / "checkpoints" / "6")
    done = run("--resume", folder)
    assert done.returncode == 0, done.stderr
    assert read_checkpoint(folder) == expected
    assert read_metrics(folder) == metrics


def test_learning_rate_on_resume_is_applied_from_there_on(
    whole: Path, interrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    start = len(read_lines(folder))
    done = run_until(
        start + 20,
        signal.SIGTERM,
        "--resume",
        folder,
        "--learning-rate=1e-4",
        "--mesh=data=4,model=2",
    )
    assert done.returncode == 130, done.stderr
    said = done.stdout.splitlines()
    assert f", from step {steps(interrupted)[-1]} on" in " ".join(done.stdout.split())
    assert said[-1].endswith(f"--resume {folder} --learning-rate=0.0001")
    assert (folder / "plot.png").read_bytes().startswith(PNG)
    metrics, others = read_metrics(folder), read_metrics(whole)
    assert metrics[:start] == others[:start]
    # The first loss is of the parameters that both runs have; then they part.
    assert metrics[start]["loss"] == others[start]["loss"]
    assert metrics[start + 1]["loss"] != others[start + 1]["loss"]
    assert {line["learning_rate"] for line in metrics[start:]} == {float(np.float32(1e-4))}
    config = json.loads((folder / "config.json").read_text())
    assert config["learning_rate"] == 4e-3


DRIVER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
sys.path.insert(0, sys.argv[1])
import train_lm
results = {}
for name, arguments in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = train_lm.main(arguments)
    results[name] = code, out.getvalue(), err.getvalue()
print(json.dumps(results))
"""
# Bad command lines, and a part of what is said about each. They run in one process.
BAD = {
    "unknown flag": (["--stepps=3"], "--stepps"),
    "no switch": (["--zero=no"], "--zero"),
    "no number": (["--steps=many"], "--steps"),
    "no steps": (["--steps=0"], "--steps must be at least 1"),
    "negative seed": (["--seed=-1"], "--seed must be at least 0"),
    "large seed": ([f"--seed={10**20}"], "--seed must be at most 4294967295"),
    "many steps": ([f"--steps={10**20}"], "--steps must be at most 2147483647"),
    "a long sample": ([f"--sample-bytes={10**10}"], "--sample-bytes must be at most 1000000"),
    "infinite rate": (["--learning-rate=inf"], "--learning-rate must be a positive number"),
    "a rate of zero in float32": (["--learning-rate=1e-60"], "--learning-rate must be a positive"),
    "an infinite rate in float32": (["--learning-rate=1e300"], "--learning-rate must be a positi"),
    "a large model": ([f"--d-model={10**8}"], "take a smaller --d-model or --layers"),
    "a large batch": ([f"--batch-size={10**9}"], "take a smaller --batch-size or --sequence-len"),
    "heads": (["--d-model=20", "--heads=3"], "--d-model 20"),
    "no mesh": (["--mesh=8"], "--mesh must look like"),
    "unknown axis": (["--mesh=data=4,modle=2"], "--mesh must look like"),
    "repeated axis": (["--mesh=data=2,data=4,model=1"], "--mesh must look like"),
    "empty mesh": (["--mesh=data=0,model=2"], "--mesh must have"),
    "mesh and batch": (["--mesh=data=3,model=2"], "data=3 must divide --batch-size 8"),
    "no microbatch": (["--microbatches=0"], "--microbatches must be at least 1"),
    "microbatches": (
        ["--microbatches=4", "--mesh=data=4,model=2"],
        "4 x data=4 of --mesh must divide --batch-size 8",
    ),
    "microbatches on resume": (["--resume=whole", "--microbatches=3"], "--microbatches 3 does not"),
    "mesh and heads": (["--mesh=data=2,model=4"], "model=4 must divide --heads 2"),
    "too large a mesh": (["--mesh=data=8,model=2"], "takes 16 devices, and there are 8 cpu dev"),
    "no data": (["--data", "nowhere"], "nowhere: No such file"),
    "little data": (["--data", "little"], "too small"),
    "not empty": (["--out", "whole"], "whole is not empty"),
    "a file": (["--out", "little"], "cannot write"),
    "out and resume": (["--out=a", "--resume=whole"], "not allowed with"),
    "no run": (["--resume=nowhere"], "nowhere is not the folder of a run"),
    "no configuration": (["--resume=odd"], "not the configuration of a run"),
    "other width": (["--resume=whole", "--d-model=32"], "--d-model is 16 there, not 32"),
    "other steps": (["--resume=whole", "--steps=99"], f"--steps is {STEPS} there, not 99"),
    "rate on resume": (["--resume=whole", "--learning-rate=nan"], "--learning-rate must be"),
    "other text": (["--resume=other_text"], "is not, or no longer, the text"),
    "other checkpoint": (["--resume=other_checkpoint"], "of another configuration: 34 kept"),
    "damaged checkpoints": (["--resume=damaged"], "every checkpoint of damaged is damaged"),
    "old checkpoint": (["--resume=old"], "old/checkpoint.msgpack is of an older version"),
    "no process": (["--processes=0"], "--processes must be at least 1; got 0"),
    "no such process": (["--processes=2", "--process-id=2"], "--process-id must be from 0 to 1"),
    "no time": (["--heartbeat-timeout=0"], "--heartbeat-timeout must be at least 1"),
    "no coordinator": (
        ["--processes=2", "--process-id=0", "--coordinator=nonsense", "--out=a"],
        "--coordinator must be a host and a port",
    ),
    "a large port": (
        ["--processes=2", "--process-id=0", "--coordinator=localhost:65536", "--out=a"],
        "--coordinator must be a host and a port",
    ),
    "no process number": (["--processes=2", "--out=a"], "give each a --process-id"),
    "no common folder": (["--processes=2", "--process-id=0"], "--processes needs --out"),
}


PHASE = re.compile(
    r"(Starting|Finding the text|Planning|Waiting for the other)[^.]* \.\.\.( \d+ s)?"
)


@pytest.fixture(scope="module")
def bad_world(text: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the bad command lines name."""
    world = tmp_path_factory.mktemp("bad")
    (world / "little").write_text("too little")
    for name in "whole", "other_text", "other_checkpoint", "damaged":
        shutil.copytree(whole, world / name)
    (world / "odd").mkdir()
    (world / "odd" / "config.json").write_text('{"steps": "many"}')
    shutil.copytree(text, world / "text")
    (world / "text" / "00.py").write_text("something else\n" * 50)
    config = json.loads((whole / "config.json").read_text())
    other_text = {**config, "data": [str(world / "text")]}
    (world / "other_text" / "config.json").write_text(json.dumps(other_text))
    (world / "other_checkpoint" / "config.json").write_text(json.dumps({**config, "layers": 2}))
    for step in (world / "damaged" / "checkpoints").glob("[0-9]*"):
        damage(step)
    shutil.copytree(whole, world / "old", ignore=shutil.ignore_patterns("checkpoints"))
    (world / "old" / "checkpoint.msgpack").write_bytes(b"\x80")
    return world


def damage(step: Path) -> None:
    """Cuts off the second half of every file of a checkpoint."""
    for file in filter(Path.is_file, step.rglob("*")):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture(scope="module")
def refusals(bad_world: Path, text: Path) -> dict[str, Any]:
    """Exit code, stdout and stderr of every bad command line, and what changed on the disk."""
    before = snapshot(bad_world)
    commands = {}
    for name, (arguments, _) in BAD.items():
        is_new = not any(a.startswith("--resume") for a in arguments)
        base = [f"--data={text}", *TINY] if is_new else []
        commands[name] = [*base, *arguments]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, EXAMPLES],
        input=json.dumps(commands),
        cwd=bad_world,
        env={**ENVIRONMENT, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "untouched": snapshot(bad_world) == before}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(refusals: dict[str, Any], name: str) -> None:
    code, stdout, stderr = refusals[name]
    assert code == 2, stderr
    assert stdout == ""
    *others, last = stderr.splitlines()
    assert last.startswith("train_lm: error: ")
    assert BAD[name][1] in last
    assert all("is passed over: " in line or PHASE.fullmatch(line) for line in others), others


def test_flags_are_refused_before_jax_is_imported() -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1])\nimport train_lm\n"
    script += "print(train_lm.main(['--seed=-1']), {'jax', 'numpy', 'flax'} & {*sys.modules})"
    command = [sys.executable, "-c", script, str(EXAMPLES)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"


def test_ctrl_c_while_jax_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("train_lm", monkeypatch)

    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "lm.training":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "lm.training", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert program.main([]) == 130
    assert capsys.readouterr().err == "Starting ...\ntrain_lm: interrupted\n"


def test_bad_input_writes_nothing(refusals: dict[str, Any]) -> None:
    assert refusals["untouched"]


def test_exit_code_of_the_process(tmp_path: Path) -> None:
    done = run("--steps=-1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train_lm: error: --steps must be at least 1; got -1\n"
    assert not list(tmp_path.iterdir())


PLACING = """
import dataclasses, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, numpy as np
from opt_checkpoint import named_state
from lm import training
from lm.config import Config
from lm.job import make_job
from lm.placement import check_step, describe_report
from opt_partition.errors import ShardingMismatchError

def specs(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): list(leaf.sharding.spec)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

def held(tree):
    devices = dict.fromkeys(map(str, jax.devices()), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            devices[str(shard.device)] += shard.data.nbytes
    return sorted(set(devices.values()))

def train(step, optimizer):
    windows = jax.device_put(np.arange(8 * 129, dtype=np.uint8).reshape(8, 129), job.rows)
    metrics = []
    for rate in (0.5, 0.25, 0.125):
        optimizer, line = step(optimizer, windows, {"learning_rate": jnp.float32(rate)})
        metrics.append(training.numbers(line))
    return optimizer, metrics

def bits(optimizer):
    leaves = named_state(optimizer).items()
    return b"".join(name.encode() + np.asarray(leaf).tobytes() for name, leaf in leaves)

def restore(place, optimizer):
    return training.plan_resume(place, named_state(optimizer), Path("x")).apply()

config = Config((sys.argv[2],), layers=1, d_model=16, heads=2, batch_size=8, optimizer="adamw")
job = make_job(config)
jobs = {"zero": job, "plain": dataclasses.replace(
    job, config=dataclasses.replace(job.config, zero=False))}
places = {name: training.plan_optimizer(job) for name, job in jobs.items()}
out = {}
steps = {name: training.compile_step(job, places[name], {"learning_rate": jnp.float32(1)})
         for name, job in jobs.items()}
for name, place in places.items():
    other = "zero" if name == "plain" else "plain"
    report = check_step(steps[name], place)
    try:
        check_step(steps[other], place)
        mismatch = ""
    except ShardingMismatchError as error:
        mismatch = str(error)
    optimizer = training.create_optimizer(jobs[name], place)
    moved = restore(places[other], optimizer)
    back = restore(place, moved)
    states = [bits(o) for o in (optimizer, moved, back)]
    out[name] = {
        "specs": specs(optimizer), "planned_specs": specs(place.optimizer),
        "back_specs": specs(back), "moved_specs": specs(moved),
        "same_bytes": states[0] == states[1] == states[2], "bytes": states[0].hex(),
        "held": held(optimizer.state.param_states), "planned": place.plan.state_bytes_per_device,
        "verified": report.bytes_per_device("state"), "mismatch": mismatch,
        "said": describe_report(report)}
    optimizer, out[name]["metrics"] = train(steps[name], optimizer)
    out[name]["after_specs"] = specs(optimizer)
print(json.dumps(out | {"devices": len(jax.devices())}))
"""


@pytest.fixture(scope="module")
def placed(text: Path) -> dict[str, Any]:
    """What was found about the optimizer without ZeRO, and with it."""
    done = subprocess.run(
        [sys.executable, "-c", PLACING, EXAMPLES, text],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["devices"] == 8
    return found


# Of a parameter, and of its moments under ZeRO.
SPECS: dict[str, tuple[list[str | None], list[str | None]]] = {
    "mlp_0/in": ([None, "model"], ["data", "model"]),
    "attention_0/qkv": ([None, None, "model", None], [None, "data", "model", None]),
    "embedding/v": (["model", None], ["model", "data"]),
    "norm/scale": ([None], ["data"]),
}


@pytest.mark.parametrize("name", ["plain", "zero"])
def test_state_is_sharded_as_the_parameters_and_over_data_by_zero(
    placed: dict[str, Any], name: str
) -> None:
    found = placed[name]
    other = placed["plain" if name == "zero" else "zero"]
    for kind in "planned_specs", "back_specs", "after_specs":
        assert found[kind] == found["specs"]
    assert found["moved_specs"] == other["specs"]
    for leaf, (of_parameter, of_zero) in SPECS.items():
        of_state = of_parameter if name == "plain" else of_zero
        specs = {path: s for path, s in found["specs"].items() if path.endswith(f"/{leaf}")}
        if leaf != "embedding/v":
            assert specs.pop(f"target/{leaf}") == of_parameter
        assert list(specs.values()) == [of_state] * (1 if leaf == "embedding/v" else 2)
    assert found["specs"]["target/embedding"] == ["model", None]


@pytest.mark.parametrize("name", ["plain", "zero"])
def test_devices_hold_what_was_planned_and_the_step_is_found_to_keep(
    placed: dict[str, Any], name: str
) -> None:
    found = placed[name]
    assert found["held"] == [found["planned"]] == [found["verified"]]


def test_zero_divides_the_state_by_the_size_of_data(placed: dict[str, Any]) -> None:
    counters = 4 * 4 + 3 * 4  # and Adafactor's placeholders
    assert placed["plain"]["planned"] - counters == 4 * (placed["zero"]["planned"] - counters)
    assert " all-gather " in placed["zero"]["said"]
    assert "all-gather" not in placed["plain"]["said"]


def test_a_step_that_does_not_keep_the_placement_is_refused(placed: dict[str, Any]) -> None:
    for name in "plain", "zero":
        assert "error: sharding: input 0/state/param_states/" in placed[name]["mismatch"]


def test_checkpoints_are_the_same_bytes_with_zero_and_without(placed: dict[str, Any]) -> None:
    assert placed["plain"]["same_bytes"]
    assert placed["zero"]["same_bytes"]
    assert placed["plain"]["bytes"] == placed["zero"]["bytes"]  # of the new optimizers


def test_one_compiled_step_serves_all_learning_rates(placed: dict[str, Any]) -> None:
    plain, zero = (placed[name]["metrics"] for name in ("plain", "zero"))
    assert [line["learning_rate"] for line in plain] == [0.5, 0.25, 0.125]
    for a, b in zip(plain, zero, strict=True):
        # Sums in another order; rates this large make the most of it.
        assert flatten(a) == pytest.approx(flatten(b), rel=1e-3)


WATCHED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jax, train_lm
from lm import training
seen = {}
def watch(name):
    original = getattr(training, name)
    def watched(*args, **kwargs):
        seen.setdefault(name, []).append(sum(array.nbytes for array in jax.live_arrays()))
        return original(*args, **kwargs)
    setattr(training, name, watched)
for name in "describe_plan", "check_step", "train":
    watch(name)
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **kwargs: compiled.append(event) if "backend_compile" in event else None)
def count(*args, original=training.train):
    compiled.clear()
    result = original(*args)
    seen["compiled while training"] = len(compiled)
    return result
training.train = count
def save(*args, original=training.Checkpointer.save, **kwargs):
    before = len(compiled)
    original(*args, **kwargs)
    del compiled[before:]  # of digests, once
training.Checkpointer.save = save
training.write_report = lambda *_: None  # it compiles programs of its own
code = train_lm.main(sys.argv[2:])
print(json.dumps(seen))
sys.exit(code)
"""


def test_no_zero_on_resume_continues_from_the_same_numbers(
    whole: Path, interrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    config = json.loads((folder / "config.json").read_text())
    for name, default in ("microbatches", 1), ("skip_nonfinite", False):
        assert config.pop(name) == default
    (folder / "config.json").write_text(json.dumps(config))  # as before there were these
    start = len(read_lines(folder))
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, EXAMPLES, "--resume", folder, "--no-zero"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    seen = json.loads(last)
    # Plan and check come before any array, the optimizer before the first step.
    assert seen["describe_plan"] == seen["check_step"] == [0]
    assert seen["train"][0] > 100_000
    assert seen["compiled while training"] == 0
    metrics, others = read_metrics(folder), read_metrics(whole)
    assert metrics[:start] == others[:start]
    assert len(metrics) == STEPS
    np.testing.assert_allclose(
        [line["loss"] for line in metrics], [line["loss"] for line in others], rtol=1e-3
    )
    assert "(ZeRO-1)" in (whole / "placement.txt").read_text()
    assert "(ZeRO-1)" not in (folder / "placement.txt").read_text()


# Runs command lines in one process. Bytes of 255 make the loss of their row infinite, 254 its
# gradient; they are put into the rows that are named, of the steps that are named.
PLANTING = """
import io, json, sys
from pathlib import Path
from contextlib import redirect_stderr, redirect_stdout
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, numpy as np, optax
import train_lm
from lm import training
from lm.config import parse_arguments
from lm.data import Batches
from opt_checkpoint import Checkpointer

loss_of, next_of, save = training.next_byte_loss, Batches.__next__, Checkpointer.save

def planted_loss(model, params, windows):
    loss, first = loss_of(model, params, windows), windows[:, :1]
    steep = first == 254
    loss = jnp.where(steep, loss + jnp.sqrt(jnp.where(steep, loss * 0, 1)), loss)
    return jnp.where(first == 255, jnp.inf, loss)

def planted_batch(batches):
    batch = np.array(next_of(batches))
    step = batches.state()["position"]
    clean[step] = batch.copy()
    for row, byte in plants.get(str(step), {}).items():
        batch[int(row), 0] = byte
    return batch

def watched_save(checkpoints, step, optimizer, **options):
    saved[step] = jax.device_get(optimizer)
    save(checkpoints, step, optimizer, **options)

def alone(steps):
    # What the rows that stay say by themselves, with the parameters that the step began with.
    found = {}
    path = Path(folder)
    job, _ = training.resume(path, parse_arguments([f"--resume={path}"]))
    for step in steps:
        rows = np.delete(clean[step], list(map(int, plants[str(step)])), axis=0)
        mean = lambda params: loss_of(job.model, params, rows).mean()
        loss, grads = jax.value_and_grad(mean)(saved[step - 1].target)
        found[step] = float(loss), float(optax.tree.norm(grads))
    return found

def untouched(step):
    after, before = ([saved[s].target, saved[s].state.param_states] for s in (step, step - 1))
    return all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(before)))

training.next_byte_loss = planted_loss
Batches.__next__, Checkpointer.save = planted_batch, watched_save
results = {}
for name, (folder, arguments, plants, partial) in json.load(sys.stdin).items():
    clean, saved = {}, {}
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = train_lm.main(arguments)
    results[name] = {"code": code, "stdout": out.getvalue(), "stderr": err.getvalue(),
                     "untouched": [s for s in saved if s - 1 in saved and untouched(s)],
                     "saved": sorted(saved), "alone": alone(partial)}
print(json.dumps(results))
"""
ALL_ROWS, LAST = {str(row): 255 for row in range(8)}, 8
PLANTS: dict[str, dict[str, int]] = {"3": ALL_ROWS, "5": {"2": 255}, "6": {"5": 254}}


@pytest.fixture(scope="module")
def accumulated(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs with several microbatches, and runs in which not everything is finite."""
    folder = tmp_path_factory.mktemp("accumulated")
    skipping = [*TINY, f"--steps={LAST}", "--checkpoint-every=1"]
    curve = [*TINY, "--steps=16", "--batch-size=32", "--no-zero"]
    new: dict[str, tuple[list[str], dict[str, dict[str, int]], list[int]]] = {
        "1": (curve, {}, []),
        "8": ([*curve, "--microbatches=8"], {}, []),
        "8 zero": ([*curve, "--microbatches=8", "--zero"], {}, []),
        "skip": ([*skipping, "--microbatches=2", "--skip-nonfinite"], PLANTS, [5, 6]),
        "skip 1": ([*skipping, "--skip-nonfinite"], PLANTS, []),
        "guard": ([*skipping, "--guard", "--average=0.9"], PLANTS, []),
        "nothing": ([*skipping, "--microbatches=2", "--skip-nonfinite"], {}, []),
        "stop": ([*skipping, "--microbatches=2"], PLANTS, []),
    }
    commands: dict[str, Any] = {
        name: (str(folder / name), [f"--out={folder / name}", f"--data={text}", *arguments], *rest)
        for name, (arguments, *rest) in new.items()
    }
    again = [f"--resume={folder / 'stop'}", "--skip-nonfinite", "--zero"]
    commands["go on"] = (str(folder / "stop"), again, PLANTS, [])
    rate = [*again[1:], f"--resume={folder / 'rate'}", "--learning-rate=1e-3"]
    commands["rate"] = (str(folder / "rate"), rate, PLANTS, [])
    first = {name: command for name, command in commands.items() if name not in ("go on", "rate")}
    found = plant(first)
    shutil.copytree(folder / "stop", folder / "rate")
    found |= plant({name: command for name, command in commands.items() if name not in first})
    for name, result in found.items():
        result["metrics"] = read_metrics(Path(commands[name][0]))
    return found


def plant(commands: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PLANTING, EXAMPLES],
        input=json.dumps(commands),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def values(result: dict[str, Any], name: str) -> list[float]:
    return [line[name] for line in result["metrics"] if name in line]


@pytest.mark.parametrize("name", ["8", "8 zero"])
def test_microbatches_change_losses_by_rounding_only(
    accumulated: dict[str, Any], name: str
) -> None:
    one, many = accumulated["1"], accumulated[name]
    assert (one["code"], many["code"]) == (0, 0), many["stderr"]
    # A mean of 512 float32 values in another order: a few times 2**-24. Over 40 updates losses
    # were at most 3.4e-7 apart, and 2.9e-7 where only the mesh was another (data=8,model=1).
    for metric in "loss", "grad_norm":
        assert len(values(many, metric)) == 16
        np.testing.assert_allclose(values(many, metric), values(one, metric), rtol=2e-6)
    assert values(many, "learning_rate") == values(one, "learning_rate")
    assert "skipped" not in many["stderr"]


def test_gradients_of_microbatches_are_reduced_once_a_step(accumulated: dict[str, Any]) -> None:
    one, many = (sent(accumulated[name]["stdout"]) for name in ("1", "8"))
    assert set(many) == {"all-reduce"}
    # Those over `model` are in the layers; there are eight times as many, of an eighth each.
    assert many["all-reduce"] < 1.5 * one["all-reduce"]


def sent(stdout: str) -> dict[str, float]:
    line = next(line for line in stdout.splitlines() if line.startswith("  sent by a device"))
    found = re.findall(r"\d+ ([a-z-]+) (\S+) KiB", line)
    assert found, line
    return {kind: float(amount) for kind, amount in found}


@pytest.mark.parametrize(("name", "at_5_and_6"), [("skip", 1), ("skip 1", 2), ("nothing", 0)])
def test_what_is_not_finite_is_skipped_and_reported(
    accumulated: dict[str, Any], name: str, at_5_and_6: int
) -> None:
    found = accumulated[name]
    assert found["code"] == 0, found["stderr"]
    at_3 = 8 if at_5_and_6 else 0
    expected = [0, 0, at_3, 0, at_5_and_6, at_5_and_6, 0, 0]
    assert values(found, "skipped") == expected
    shown = re.findall(r"  skipped (\d+)  ", found["stderr"])
    assert list(map(int, shown)) == [expected[0], expected[-1]]  # the others within a minute
    for line in found["metrics"]:
        assert all(math.isfinite(value) for value in line.values())
        assert ("loss" in line) == (line["skipped"] < 8)


def test_a_microbatch_that_is_dropped_is_as_if_the_batch_did_not_have_it(
    accumulated: dict[str, Any],
) -> None:
    found = accumulated["skip"]
    for step, expected in found["alone"].items():
        line = found["metrics"][int(step) - 1]
        assert (line["loss"], line["grad_norm"]) == pytest.approx(expected, rel=1e-5)
    assert list(found["alone"]) == ["5", "6"]


def test_a_step_without_anything_finite_changes_nothing_but_the_count(
    accumulated: dict[str, Any],
) -> None:
    for name in "skip", "skip 1":
        found = accumulated[name]
        assert found["saved"] == list(range(1, LAST + 1))
        assert found["untouched"] == [3]
    assert accumulated["nothing"]["untouched"] == []
    rates, all_rates = (values(accumulated[n], "learning_rate") for n in ("skip", "nothing"))
    assert rates == all_rates[: LAST - 1]  # the schedule waits for the update that was not made


def test_guarded_steps_are_not_made_and_the_average_is_evaluated(
    accumulated: dict[str, Any],
) -> None:
    result = accumulated["guard"]
    assert result["code"] == 0, result["stderr"]
    assert result["untouched"] == [3, 5, 6]  # parameters, average and all states
    lines = {int(line["step"]): line for line in result["metrics"]}
    for step in (3, 5, 6):
        noted = {name: lines[step][name] for name in ("skipped", "reason")}
        assert noted == {"skipped": LAST, "reason": "nonfinite"}
        assert "loss" not in lines[step]
    assert all(math.isfinite(lines[8][f"held_out/{of}"]) for of in ("average", "trained"))
    assert all(math.isfinite(line["loss"]) for line in lines.values() if "loss" in line)
    assert "  not averaged" in result["stdout"]


def test_without_skipping_the_run_stops_and_can_continue_with_it(
    accumulated: dict[str, Any],
) -> None:
    stopped, found, skip = (accumulated[name] for name in ("stop", "go on", "skip"))
    assert stopped["code"] == 2
    last = stopped["stderr"].splitlines()[-1]
    assert last.startswith("train_lm: error: the loss is inf at step 3: take a lower --learning-r")
    assert stopped["saved"] == [1, 2]
    assert found["code"] == 0, found["stderr"]
    assert values(found, "skipped") == values(skip, "skipped")[2:]
    np.testing.assert_allclose(values(found, "loss"), values(skip, "loss"), rtol=1e-5)
    rate = accumulated["rate"]
    assert rate["code"] == 0, rate["stderr"]
    assert set(values(rate, "learning_rate")[2:]) == {float(np.float32(1e-3))}


def test_a_run_of_which_everything_is_skipped_stops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = load("lm.training", monkeypatch)
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
    folder.save_results({"bits": {"gzip": math.nan, "bigram": 1.5}})
    results = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert results == {"bits": {"gzip": None, "bigram": 1.5}}


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
    training = load("lm.training", monkeypatch)
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


MEETING = """
import sys
sys.path.insert(0, sys.argv[1])
from lm import processes
process, processes.MEETING_SECONDS = map(int, sys.argv[2:4])
with processes.together(processes.Cluster(2, process, sys.argv[4])):
    pass
"""


def test_a_process_that_waits_alone_says_so_and_ends() -> None:
    with socket.create_server(("localhost", 0)) as server:  # a port that is free afterwards
        ours = f"localhost:{server.getsockname()[1]}"

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEETING, *map(str, (EXAMPLES, *arguments))]
        return subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)

    with start(0, 1, ours) as first, start(1, 90, "192.0.2.1:1234") as second:
        assert second.stderr
        assert next(second.stderr) == "Waiting for the other processes, at most 90 s ...\n"
        second.send_signal(signal.SIGINT)
        ends = [process.communicate(timeout=60)[1].splitlines()[-1] for process in (first, second)]
    assert (first.returncode, second.returncode) == (2, 130)
    assert ends[0].startswith(
        f"train_lm: error: --processes 2 did not all meet at --coordinator {ours} within 1 s: start"
    )
    assert ends[1] == "train_lm: interrupted"


def test_a_coordinator_whose_port_is_taken_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = load("lm.processes", monkeypatch)
    with socket.create_server(("", 0)) as server:
        coordinator = f"localhost:{server.getsockname()[1]}"
        cluster = processes.Cluster(2, 0, coordinator)
        with (
            pytest.raises(processes.UsageError, match=f"--coordinator {coordinator} cannot be had"),
            processes.together(cluster),
        ):
            pass


def count_unigram_bits(train: bytes, held_out: bytes) -> float:
    total = 0.0
    for byte in held_out[1:]:
        total -= math.log2((train.count(byte) + 1) / (len(train) + 256))
    return total / (len(held_out) - 1)


def count_bigram_bits(train: bytes, held_out: bytes) -> float:
    pairs: dict[tuple[int, int], int] = {}
    befores: dict[int, int] = {}
    for pair in pairwise(train):
        pairs[pair] = pairs.get(pair, 0) + 1
        befores[pair[0]] = befores.get(pair[0], 0) + 1
    total = 0.0
    for before, after in pairwise(held_out):
        prior = (train.count(after) + 1) / (len(train) + 256)
        total -= math.log2((pairs.get((before, after), 0) + prior) / (befores.get(before, 0) + 1))
    return total / (len(held_out) - 1)


def test_flags_of_a_continuation_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("lm.config", monkeypatch)
    saved = {"learning_rate": 1e-3, "mesh": "data=4,model=2", "zero": True, "sample_bytes": 9}
    given = {"learning_rate": 1e-3, "mesh": "data=8,model=1", "zero": False, "sample_bytes": 9}
    found = config.repeated_flags(given, saved)
    assert found == ["--learning-rate=0.001", "--mesh=data=8,model=1", "--no-zero"]
    assert config.repeated_flags({"zero": True, "mesh": "m"}, {"mesh": "m"}) == ["--zero"]
    given = {"microbatches": 1, "skip_nonfinite": True}
    assert config.repeated_flags(given, {}) == ["--skip-nonfinite"]
    given = {"microbatches": 4, "skip_nonfinite": False}
    assert config.repeated_flags(given, {}) == ["--microbatches=4"]


def describe(monkeypatch: pytest.MonkeyPatch, rows: int, data: int, zero: str | None) -> list[str]:
    """What is said of SGD with momentum for five matrices over `data` and `model=2`."""
    placement = load("lm.placement", monkeypatch)
    params = {f"w{i}": jax.ShapeDtypeStruct((rows, 5), jnp.float32) for i in range(5)}
    plan = placement.memory_plan(
        optax.sgd(0.1, momentum=0.9),
        params,
        dict.fromkeys(params, ("mlp", "embed")),
        placement.AXIS_RULES,
        jax.sharding.AbstractMesh((data, 2), ("data", "model")),
        zero=zero,
    )
    lines: list[str] = placement.describe_plan(plan).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["Plan", "state", "all", "together"]
    return lines[4:]


def test_notes_of_a_plan_are_shown_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(monkeypatch, rows=8, data=4, zero="data") == []
    # Parameters, gradients and momenta, five each; three are shown.
    *notes, more = describe(monkeypatch, rows=7, data=4, zero=None)
    assert notes == [
        f"  note: params w{i}: dimension 0 ('mlp', 7) is not divisible by model=2" for i in range(3)
    ]
    assert more == "  12 more notes"
    # Where nothing divides, ZeRO is not to be had either.
    *_, more = describe(monkeypatch, rows=7, data=4, zero="data")
    assert more == "  17 more notes"


def test_zero_that_has_nothing_to_divide_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    note = "  note: --zero changes nothing: data=1 leaves one device for all of the state"
    assert describe(monkeypatch, rows=8, data=1, zero="data") == [note]
    assert describe(monkeypatch, rows=8, data=1, zero=None) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (2**50, "1,024.0 TiB"),
    ],
)
def test_amounts_are_for_people(monkeypatch: pytest.MonkeyPatch, count: int, text: str) -> None:
    assert load("lm.placement", monkeypatch).amount(count) == text


def load(module: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(module)


def test_baselines_agree_with_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = load("lm.baselines", monkeypatch)
    train, held_out = b"abracadabra, said the witch\xff\x00" * 3, b"a witch said: abba\x00\xfe"
    arrays = [np.frombuffer(t, np.uint8) for t in (train, held_out)]
    assert baselines.unigram_bits(*arrays) == pytest.approx(count_unigram_bits(train, held_out))
    assert baselines.bigram_bits(*arrays) == pytest.approx(count_bigram_bits(train, held_out))
    np.testing.assert_allclose(baselines.fit_unigram(arrays[0]).sum(), 1)
    np.testing.assert_allclose(baselines.fit_bigram(arrays[0]).sum(axis=1), 1)


def test_every_held_out_byte_is_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = load("lm.data", monkeypatch)
    for size, context in itertools.product((2, 8, 9, 10, 64, 65, 100), (1, 4, 8)):
        text = np.arange(size, dtype=np.uint8)
        predicted: list[int] = []
        batches = data.batches_in_order(text, batch_size=4, window=9, context=context)
        for windows, counts in batches:
            assert windows.shape == (4, 9)
            assert (np.diff(windows.astype(int), axis=1)[counts] == 1).all()
            new = windows[:, 1:][counts].tolist()
            seen = windows[counts.any(axis=1), 0].astype(int)  # each sees what is before it
            firsts = windows[:, 1:][counts.cumsum(axis=1) * counts == 1].astype(int)
            assert all(f - s >= min(context, f) for f, s in zip(firsts, seen, strict=True))
            predicted += new
        assert predicted == list(range(1, size))


def test_files_in_a_fixed_order_without_tests_and_site_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = load("lm.data", monkeypatch)
    files = ["b.py", "a/z.py", "a.py", "site-packages/x.py", "a/test/x.py", ".git/x.py", "c.txt"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name} " * 20)
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    library = data.load_text((), window=4)
    expected = "".join(f"{name} " * 20 for name in ("a.py", "b.py", "a/z.py"))
    assert (library.train.tobytes() + library.held_out.tobytes()).decode() == expected
    given = data.load_text([str(tmp_path / "c.txt"), str(tmp_path / "c.txt")], window=4)
    assert given.train.tobytes() + given.held_out.tobytes() == b"c.txt " * 20


def make_batches(
    monkeypatch: pytest.MonkeyPatch, key: int, batch_size: int = 512, window: int = 199
) -> Any:
    data = load("lm.data", monkeypatch)
    text = np.arange(200, dtype=np.uint8)
    return data.Batches(text, key, batch_size=batch_size, window=window)


def test_batches_continue_from_their_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(monkeypatch, 1)
    first = [next(batches) for _ in range(5)]
    state = json.loads(json.dumps(batches.state()))
    rest = [next(batches) for _ in range(3)]
    other = make_batches(monkeypatch, 2)  # its own key and position do not count
    next(other)
    other.restore(state)
    np.testing.assert_array_equal([next(other) for _ in range(3)], rest)
    assert other.state() == batches.state() == {"key": 1, "position": 8}
    np.testing.assert_array_equal(next(iter(make_batches(monkeypatch, 1))), first[0])


def test_batches_differ_and_reach_the_end_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(monkeypatch, 1)
    first, second = next(batches), next(batches)
    assert set(first[:, 0].tolist()) == {0, 1}  # the last window, too
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, next(make_batches(monkeypatch, 2)))
