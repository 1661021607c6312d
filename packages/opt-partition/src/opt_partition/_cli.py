"""The command line: `opt-partition explain|plan MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pkgutil
import sys
import tomllib
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from opt_partition._explain import explain, explanation_text
from opt_partition._memory_plan import memory_plan
from opt_partition._plan import MemoryPlan, plan_text
from opt_partition.errors import PartitionError

_EXAMPLES = """\
MODULE:FUNCTION is called without arguments and returns (transformation, parameters, logical axes);
the parameters may be jax.ShapeDtypeStructs. Modules in the current directory can be imported.
The devices of the mesh need not exist, and nothing is allocated on them.

examples:
  opt-partition explain train:optimizer
  opt-partition plan train:optimizer --mesh data=8,model=4 --rules rules.toml --zero data

rules.toml, in order of precedence, with "" for no mesh axis:
  rules = [["mlp", "model"], ["embed", ["data", "fsdp"]], ["layers", ""]]
"""


class InputError(Exception):
    """Invalid input; the message is shown without a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 2 after a message to standard error for invalid input."""
    if hasattr(sys.stdout, "reconfigure"):
        # A path may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        text = _explain(arguments) if arguments.command == "explain" else _plan(arguments)
    except (InputError, PartitionError) as error:
        print(f"opt-partition: {error}", file=sys.stderr)
        return 2
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader may close a pipe early
        # Flushing the rest when Python exits would fail again, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    style: dict[str, Any] = {
        "epilog": _EXAMPLES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    what = "Explain and plan the sharding of an optimizer state."
    parser = argparse.ArgumentParser(prog="opt-partition", description=what, **style)
    program_version = f"%(prog)s {version('opt-partition')}"
    parser.add_argument("--version", action="version", version=program_version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain|plan")

    def command(name: str, text: str, strict: str) -> tuple[argparse.ArgumentParser, Any]:
        made = commands.add_parser(name, help=text, description=text, **style)
        made.add_argument("target", metavar="MODULE:FUNCTION", help="function that returns the job")
        made.add_argument("--strict", action="store_true", help=f"fail if {strict}")
        everything = "show everything instead of what fits a screen"
        made.add_argument("--all", action="store_true", help=everything)
        output = made.add_mutually_exclusive_group()
        output.add_argument("--json", action="store_true", help="print JSON")
        return made, output

    axes = "Show which parameter dimension each dimension of the state follows, and why."
    memory = "Show the bytes per device of parameters, gradients, accumulators and optimizer state."
    undecided = "axes could not be determined"
    command("explain", axes, undecided)
    plan, output = command("plan", memory, f"{undecided}, or ZeRO leaves state replicated")
    add = plan.add_argument
    mesh = "the mesh, e.g. data=8,model=4"
    rules = "JSON or TOML file with pairs of a logical name and a mesh axis"
    zero = "mesh axes to shard the state over (ZeRO), e.g. data"
    level = "with --zero: 1 extends the state, 2 gradients and accumulators too (default: 1)"
    dtype = "dtype of the gradients (default: the parameters')"
    accumulate = "plan gradient accumulators too (default dtype: float32 or wider)"
    picture = "draw the plan to a file, e.g. plan.png or plan.svg (needs matplotlib)"
    add("--mesh", metavar="AXIS=SIZE,...", required=True, help=mesh)
    add("--rules", metavar="FILE", required=True, help=rules)
    add("--zero", metavar="AXIS,...", help=zero)
    add("--zero-level", type=int, choices=(1, 2), default=1, help=level)
    add("--grad-dtype", metavar="DTYPE", help=dtype)
    add("--accumulate", metavar="DTYPE", nargs="?", const=True, help=accumulate)
    output.add_argument("--picture", metavar="FILE", help=picture)
    return parser


def _explain(arguments: argparse.Namespace) -> str:
    explanation = explain(*_load_job(arguments.target), strict=arguments.strict)
    if arguments.json:
        return explanation.to_json()
    return explanation_text(explanation, everything=arguments.all)


def _plan(arguments: argparse.Namespace) -> str:
    # Validate cheap inputs before importing the user's program.
    mesh, rules = parse_mesh(arguments.mesh), read_rules(arguments.rules)
    zero = arguments.zero and tuple(axis.strip() for axis in arguments.zero.split(","))
    job = _load_job(arguments.target)
    with warnings.catch_warnings(record=True) as caught:
        try:
            plan = memory_plan(
                *job,
                rules,
                mesh,
                zero=zero,
                zero_level=arguments.zero_level,
                grad_dtype=arguments.grad_dtype,
                accumulate=arguments.accumulate,
                strict=arguments.strict,
            )
        except ValueError as error:
            raise InputError(f"`{arguments.target}`: {error}") from error
    for warning in caught:
        print(f"opt-partition: warning: {warning.message}", file=sys.stderr)
    if arguments.json:
        return plan.to_json()
    if arguments.picture is not None:
        return _draw(plan, Path(arguments.picture))
    return plan_text(plan, everything=arguments.all)


def _draw(plan: MemoryPlan, path: Path) -> str:
    try:
        plan.plot().savefig(path, format=path.suffix[1:] or "png")
    except (ImportError, ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"`{path}` cannot be written: {reason}") from error
    return f"wrote {path}"


def _load_job(target: str) -> tuple[Any, Any, Any]:
    """Calls `MODULE:FUNCTION` and returns its transformation, parameters and logical axes."""
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise InputError(f"expected MODULE:FUNCTION, found `{target}`")
    # As for `python -m`: an installed script would not find modules in the current directory.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        try:
            function = pkgutil.resolve_name(target)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise
            raise InputError(f"there is no module `{module_name}`") from None
        except AttributeError:
            raise InputError(f"`{module_name}` has no function `{name}`") from None
        job = function()
    if not isinstance(job, tuple | list) or len(job) != 3:
        raise InputError(
            f"`{target}` must return (transformation, parameters, logical axes); it returned {job}"
        )
    tx, params, param_axes = job
    return tx, params, param_axes


def parse_mesh(text: str) -> AbstractMesh:
    """Returns the mesh of a text such as `data=8,model=4`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not name or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise InputError(
                "`--mesh` must be distinct axes with sizes, e.g. data=8,model=4; found "
                f"`{part}` in `{text}`"
            )
        sizes[name] = int(size)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def read_rules(path: str) -> list[Any]:
    """Reads pairs from the value of `rules` in a TOML or JSON file, or from a whole JSON file."""
    read = {".json": json.loads, ".toml": tomllib.loads}.get(Path(path).suffix)
    if read is None:
        raise InputError(f"`--rules` must be a .json or .toml file; found `{path}`")
    try:
        data: Any = read(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"`--rules`: `{path}` cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"`--rules`: `{path}` cannot be read: {error}") from error
    pairs = data.get("rules") if isinstance(data, dict) else data
    if not isinstance(pairs, list):
        raise InputError(
            f'`--rules`: `{path}` must contain a list of pairs, e.g. [["mlp", "model"], '
            '["embed", "fsdp"]], in TOML as `rules = [...]`'
        )
    return [_rule(pair) for pair in pairs]


def _rule(pair: Any) -> Any:
    """Returns a pair with `None` for no mesh axis; `logical_to_mesh` checks it."""
    return (pair[0], pair[1] or None) if isinstance(pair, list) and len(pair) == 2 else pair
