"""The command line, as a user types it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import jax
import jax.numpy as jnp
import opt_checkpoint
import opt_optax_bridge as opt
import orbax.checkpoint as ocp
import pytest
from opt_checkpoint import Checkpointer, OptimizerSave
from opt_checkpoint._cli import main
from opt_core import Optimizer

PARAMS = {"w": jnp.full((20, 30), 0.5), "b": jnp.ones(3)}
Cli = Callable[..., tuple[int, str, str]]

MODULE = """
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from flax import nnx
from opt_checkpoint import Rename, TrainingState

RESET = [("state/trace/.*", "initialise"), ("state/adam/.*", "drop")]
MOMENTS = [(r"state/trace/trace/(.*)", Rename(r"state/adam/mu/\\1"))]
NO_LEAF = [("x", "drop")]

def params():
    return {"w": jnp.ones((20, 30)), "b": jnp.ones(3)}

def adam():
    print("noise")
    return opt.adam(1e-3).create(params())

def sgd():
    return opt.sgd(1e-3, momentum=0.9).create(params())

def plain():
    tx = optax.adam(1e-3)
    return TrainingState(tx, params(), tx.init(params()))

def nnx_pair():
    model = nnx.Linear(30, 20, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

def more():
    return opt.adam(1e-3).create({**params(), "new": jnp.ones(2)})

def broken():
    raise RuntimeError("no such\\nluck")

def none():
    return 7
"""
EXACT = "8 kept (7,244 bytes)\n"


def adam() -> Optimizer:
    optimizer: Optimizer = opt.adam(1e-3).create(PARAMS)
    return optimizer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    optimizer = adam()
    with Checkpointer(folder) as checkpointer:
        extras = {"rng": jax.random.key(0), "position": 17, "name": "a\nb"}
        checkpointer.save(0, optimizer, metadata={"data": "a.txt"}, extras=extras)
        checkpointer.save(1, optimizer.apply_gradient(optimizer.target))
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    name = f"job_{abs(hash(tmp_path))}"  # modules stay imported
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(x).replace("job:", f"{name}:") for x in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_ls_and_show_say_what_there_is(cli: Cli, root: Path) -> None:
    code, out, _ = cli("ls", root)
    assert (code, [line.split(maxsplit=4) for line in out.splitlines()]) == (
        0,
        [
            ["step", "leaves", "size", "optimizer"],
            ["0", "11", "7.1", "KiB", "adam, scale"],
            ["1", "8", "7.1", "KiB", "adam, scale"],
        ],
    )
    code, out, _ = cli("show", root / "0")
    assert (code, "step 0, 11 leaves, 7.1 KiB" in out) == (0, True)
    assert 'metadata: {"data": "a.txt"}' in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert lines["state/adam/mu/w"][1:4] == ["[20,", "30]", "float32"]
    assert lines["extra/position"][1:] == ["[]", "python", "0", "B", "17"]
    data = json.loads(cli("show", root / "0", "--json")[1])
    scalars = {x["path"][1]: x["value"] for x in data["leaves"] if x["dtype"] == "python"}
    assert scalars == {"position": 17, "name": "a\nb"}
    assert cli("show", root)[1] == cli("show", root / "1")[1]  # the latest


def test_plan_says_whether_it_fits(cli: Cli, root: Path) -> None:
    code, out, err = cli("plan", root, "job:adam")
    assert (code, out, "noise" in err) == (0, EXACT, True)
    code, out, _ = cli("plan", root, "job:sgd")
    assert code == 1
    assert "!+ state/trace/trace/w float32[20, 30]" in out
    assert out.endswith("To admit what is marked `!`: --allow drop initialise\n")
    assert json.loads(cli("plan", root, "job:sgd", "--json")[1])["is_ok"] is False
    code, out, _ = cli("plan", root, "job:sgd", "--allow", "initialise", "drop", "optimizer")
    assert (code, "!" in out) == (0, False)
    # Everyone's optimizer, as shapes: only arrays have values for new parameters.
    assert cli("plan", root, "job:plain")[:2] == (0, EXACT)
    assert "!+ params/kernel float32[30, 20]" in cli("plan", root, "job:nnx_pair")[1]
    new = ("plan", root, "job:more", "--allow", "initialise")
    assert (cli(*new)[0], cli(*new, "--allocate")[0]) == (1, 0)


def test_plan_takes_rules(cli: Cli, root: Path) -> None:
    arguments = ("plan", root, "job:sgd", "--allow", "optimizer")
    assert cli(*arguments, "--rules", "job:RESET")[0] == 0
    code, out, _ = cli(*arguments, "drop", "--rules", "job:MOMENTS", "--all")
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("state/trace/trace/w")]
    assert line.split()[4:] == ["renamed", "state/adam/mu/w"]


def test_verify_finds_a_flipped_bit(cli: Cli, root: Path, tmp_path: Path) -> None:
    assert cli("verify", root) == (0, f"{root}/0: ok, 11 leaves\n{root}/1: ok, 8 leaves\n", "")
    copy = Path(shutil.copytree(root, tmp_path / "run"))
    manifest = copy / "1" / "leaves" / "manifest.json"
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    code, out, _ = cli("verify", copy)
    good, bad = out.splitlines()
    assert (code, good) == (1, f"{copy}/0: ok, 11 leaves")
    assert bad.startswith(f"{copy}/1: DamagedError: ")


def test_names_are_printed_with_escapes(cli: Cli, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    with Checkpointer(odd) as checkpointer:
        names = ("a\nb\x1b[31m", "\ud800", "größe")
        checkpointer.save(0, opt.sgd(1e-3).create({name: jnp.ones(1) for name in names}))
    shown = (r"params/a\nb\x1b[31m", r"params/\ud800", "params/größe")
    for command in (("show", odd), ("plan", odd, "job:sgd", "--allow", "drop", "--all")):
        _, out, _ = cli(*command)
        assert all(name in out for name in shown), command
        assert all(line.isprintable() for line in out.splitlines())
    assert cli("ls", "no\x1b[31m\ud800")[2].isascii()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("ls", "nowhere"), "`nowhere` is not a folder"),
        (("plan", "ROOT", "job"), "expected MODULE:NAME"),
        (("plan", "ROOT", "no_such_module:f"), "cannot be imported"),
        (("plan", "ROOT", "job:broken"), "failed: RuntimeError: no such luck"),
        (("plan", "ROOT", "job:none"), "expected an `opt_core.Optimizer`, a `TrainingState"),
        (("plan", "ROOT", "job:adam", "--rules", "job:adam"), "`rules`"),
        (
            ("plan", "ROOT", "job:adam", "--rules", "job:NO_LEAF"),
            "matches no leaf of the checkpoint",
        ),
        (("show", "ROOT/9"), "9` is not a folder"),
        (("show", __file__), "is a file, not a folder: read a msgpack file by"),
    ],
)
def test_wrong_input_is_one_line(
    cli: Cli, root: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, out, err = cli(*(re.sub("^ROOT(?=$|/)", str(root), x) for x in arguments))
    (line,) = [line for line in err.splitlines() if line != "noise"]
    assert (code, out) == (2, "")
    assert line.startswith("opt-checkpoint: error: ")
    assert words in line


@pytest.mark.usefixtures("optax_promotion")
def test_checkpoints_of_other_programs(cli: Cli, tmp_path: Path) -> None:
    optimizer = adam()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 12):
            optimizer = optimizer.apply_gradient(optimizer.target)
            tree = {"params": optimizer.target, "opt_state": optimizer.state.param_states}
            manager.save(step, args=ocp.args.StandardSave(tree))
    # By their own paths, and by the meaning that whoever wrote them gives these.
    assert cli("verify", "run/1")[1] == "run/1: ok, 7 leaves, no digests to compare\n"
    code, out, _ = cli("ls", "run")
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["1", "7"], ["12", "7"]]
    for place in ("run", "run/12", "run/12/default"):
        code, out, _ = cli("show", place)
        assert (code, "written by another program" in out) == (0, True)
        assert "opt_state/0/mu/w" in out
    code, out, err = cli("plan", "run", "job:sgd")
    assert (code, out) == (2, "")
    assert "does not say which optimizer wrote it: give `--written-by" in err
    written_by = ("--written-by", "job:adam")
    assert cli("plan", "run", "job:adam", *written_by)[:2] == (0, EXACT)
    assert re.search("^state/adam/count .* 2$", cli("show", "run", *written_by)[1], re.M)
    code, _, err = cli("show", "run", "--written-by", "job:sgd")
    assert (code, "does not hold the state" in err) == (2, True)


def test_what_a_handler_wrote_needs_no_function(cli: Cli, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        items = {"optimizer": OptimizerSave(adam()), "data": ocp.args.JsonSave({"epoch": 1})}
        manager.save(4, args=ocp.args.Composite(**items))
    assert cli("ls", "run")[1].splitlines()[1].split() == ["4", "8", "7.1", "KiB", "adam,", "scale"]
    assert cli("verify", "run")[1] == "run/4: ok, 8 leaves\n"
    assert cli("plan", "run/4", "job:adam")[:2] == (0, EXACT)
    assert "state/adam/mu/w" in cli("show", "run/4/optimizer")[1]


@pytest.mark.slow
def test_runs_as_a_module_and_says_its_version(root: Path, tmp_path: Path) -> None:
    (tmp_path / "job_beside.py").write_text(MODULE)
    module = [sys.executable, "-m", "opt_checkpoint"]
    for arguments, expected in (
        (["plan", str(root), "job_beside:adam"], (EXACT, "noise\n")),
        (["--version"], (f"opt-checkpoint {opt_checkpoint.__version__}\n", "")),
    ):
        done = subprocess.run(
            [*module, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == expected
    (script,) = entry_points(group="console_scripts", name="opt-checkpoint")
    assert script.load() is main
