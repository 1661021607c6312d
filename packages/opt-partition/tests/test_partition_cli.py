"""The command line: what it prints, what it writes, and one line for whatever is wrong."""

import itertools
import json
import pathlib
import pkgutil
import subprocess
import sys
import tomllib
import warnings

import opt_partition
import pytest
from opt_partition.__main__ import main, read_rules

MODULE = """
import jax, optax

print("noise at import")

def params(dtype="float32"):
    leaf = jax.ShapeDtypeStruct((8, 32), dtype)
    return {f"layers_{n}": {"w": leaf} for n in range(3)}

def axes(name="embed"):
    return {f"layers_{n}": {"w": (name, "mlp")} for n in range(3)}

def adam():
    print("noise when called")
    return optax.adam(0.1), params(), axes()

def raises():
    return {}["missing\\nkey"]

def two():
    return optax.adam(0.1), params()

def wrong_axes():
    return optax.adam(0.1), params(), {"layers_0": {"w": ("a", "b", "c")}}
"""
RULES_TOML = 'rules = [["mlp", "model"], ["embed", ""]]\n'
numbers = itertools.count()


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, of a name that was not imported before."""
    name = f"cli_job_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "rules.toml").write_text(RULES_TOML)
    (tmp_path / "broken.toml").write_text("[")
    (tmp_path / "pairs.toml").write_text('rules = {mlp = "model"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return name


MESH = ["--mesh", "data=4,model=2", "--rules", "rules.toml"]
Capture = pytest.CaptureFixture[str]


def out_of(capsys: Capture, *arguments: str) -> str:
    main(arguments)
    captured = capsys.readouterr()
    assert "noise" not in captured.out
    return captured.out


def complaint(capsys: Capture, *arguments: str) -> str:
    """What is said with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    usage, _, said = captured.err.partition("error: ")
    assert "usage: opt-partition" in usage
    return said.strip()


def test_errors_of_the_program_keep_their_traceback(module: str) -> None:
    with pytest.raises(KeyError, match="missing"):
        main(["explain", f"{module}:raises"])


def test_a_plan_fits_a_screen_and_all_of_it_is_asked_for(module: str, capsys: Capture) -> None:
    arguments = ("plan", f"{module}:adam", *MESH, "--zero", "data")
    first = "mesh data=4, model=2: 8 devices; state extended over data (ZeRO-1)\n"
    short, whole = out_of(capsys, *arguments), out_of(capsys, *arguments, "--all")
    assert short.startswith(first)
    assert "parameters         1.50 KiB             1,536   3.00 KiB   3,072\n" in short
    assert len(short.splitlines()) <= 24
    assert max(map(len, short.splitlines())) <= 100
    assert "optimizer state by field" not in short
    assert (
        "ScaleByAdamState.mu          3  float32       384 B               384  3.00 KiB\n" in whole
    )


def test_zero_without_effect_is_said_in_a_line(module: str, capsys: Capture) -> None:
    one = ["--mesh", "data=1,model=2", "--rules", "rules.toml", "--zero", "data"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        main(["plan", f"{module}:adam", *one])
    [line] = [line for line in capsys.readouterr().err.splitlines() if "noise" not in line]
    assert line.startswith("opt-partition: warning: ZeRO over data=1 has no effect: 3.00 KiB stay")
    found = complaint(capsys, "plan", f"{module}:adam", *one, "--strict")
    assert "ZeRO over data=1 has no effect" in found


def test_the_console_script_and_its_version(capsys: Capture) -> None:
    file = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    scripts = tomllib.loads(file.read_text())["project"]["scripts"]
    [(name, target)] = scripts.items()
    assert name == "opt-partition"
    assert pkgutil.resolve_name(target) is main
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"opt-partition {opt_partition.__version__}\n"


def test_explain(module: str, capsys: Capture) -> None:
    lines = out_of(capsys, "explain", f"{module}:adam").splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["0/count", "0/mu/layers_0/w"]
    assert lines[-1] == "7 leaves, 6,148 bytes; `init` evaluated 2 times"


def test_json_is_all_there_is_on_standard_output(module: str, capsys: Capture) -> None:
    plan = json.loads(out_of(capsys, "plan", f"{module}:adam", *MESH, "--json"))
    assert plan["mesh"] == {"data": 4, "model": 2}
    assert plan["param_bytes_per_device"] == 3 * 8 * 16 * 4
    state = json.loads(out_of(capsys, "explain", f"{module}:adam", "--json"))
    assert sum(row["bytes"] for row in state["rows"]) == 6148


def test_what_is_asked_reaches_the_plan(module: str, capsys: Capture) -> None:
    options = ["--zero", "data", "--zero-level", "2", "--grad-dtype", "bfloat16"]
    text = out_of(
        capsys,
        "plan",
        f"{module}:adam",
        *MESH,
        *options,
        "--accumulate=float32",
        "--strict",
        "--json",
    )
    plan = json.loads(text)
    assert (plan["zero"], plan["zero_level"]) == (["data"], 2)
    assert plan["grad_bytes_per_device"] == 3 * 8 * 32 * 2 // 8
    assert plan["accumulator_bytes_per_device"] == 3 * 8 * 32 * 4 // 8
    text = out_of(capsys, "plan", f"{module}:adam", *MESH, "--accumulate", "bfloat16", "--json")
    assert json.loads(text)["accumulator_bytes"] == 3 * 8 * 32 * 2


@pytest.mark.slow
def test_a_picture_is_written(module: str, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    command = ("plan", f"{module}:adam", *MESH, "--picture")
    assert out_of(capsys, *command, "plan.svg").startswith("mesh data=4, model=2")
    assert pathlib.Path("plan.svg").read_bytes().startswith(b"<?xml")
    found = complaint(capsys, *command, "no/such/folder.png")
    assert "No such file or directory" in found
    assert "Format 'xyz' is not supported" in complaint(capsys, *command, "plan.xyz")


# Of each kind of mistake one; what other parts of the package say stands there by its words.
BAD: list[tuple[list[str], list[str]]] = [
    (["explain", "{m}:two"], ["must return (transformation, parameters, logical axes)"]),
    (["explain", "{m}:wrong_axes"], ["layers_1/w", "layers_2/w"]),
    (
        ["plan", "{m}:adam", *MESH, "--zero-level", "2"],
        ["`zero_level` must be 1, or 2 together with `zero`; found 2 with `zero=None`"],
    ),
    (
        ["plan", "{m}:adam", "--mesh", "data=4,model=two", "--rules", "rules.toml"],
        ["--mesh: expected different axes with sizes, AXIS=SIZE,..., found 'data=4,model=two'"],
    ),
    (
        ["plan", "{m}:adam", "--mesh", "data=4,data=2", "--rules", "rules.toml"],
        ["--mesh: expected different axes with sizes, AXIS=SIZE,..., found 'data=4,data=2'"],
    ),
    (
        ["plan", "{m}:adam", "--mesh", "data=4", "--rules", "nowhere.toml"],
        ["argument --rules: `rules = [...]` cannot be read: FileNotFoundError"],
    ),
    (["plan", "{m}:adam", *MESH[:3], "broken.toml"], ["cannot be read: TOMLDecodeError"]),
    (["plan", "{m}:adam", *MESH[:3], "pairs.toml"], ["`rules` must be pairs of a logical name"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: str(value)[:60])
def test_bad_input_is_said_without_a_traceback(
    module: str, capsys: Capture, arguments: list[str], words: list[str]
) -> None:
    found = complaint(capsys, *(argument.replace("{m}", module) for argument in arguments))
    assert all(word.replace("{m}", module) in found for word in words), found


def test_rules_in_files(tmp_path: pathlib.Path) -> None:
    text = 'rules = [["mlp", "model"], ["embed", ["data", "fsdp"]], ["layers", ""], ["heads", []]]'
    (tmp_path / "rules.toml").write_text(text)
    rules = [("mlp", "model"), ("embed", ["data", "fsdp"]), ("layers", None), ("heads", None)]
    assert read_rules(str(tmp_path / "rules.toml")) == rules


@pytest.mark.slow
def test_the_module_runs(module: str) -> None:
    command = [sys.executable, "-m", "opt_partition", "explain", f"{module}:adam", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(json.loads(done.stdout)["rows"]) == 7


@pytest.mark.slow
def test_the_program_runs_where_nobody_reads_to_the_end(module: str) -> None:
    command = f"'{sys.executable}' -m opt_partition explain {module}:adam --json | head -n 1"
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
