"""The command line: `opt-partition explain|plan MODULE:FUNCTION`, or `python -m opt_partition`."""

from __future__ import annotations

import argparse
import contextlib
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

from opt_partition._explain import explain
from opt_partition._memory_plan import memory_plan
from opt_partition._plan import plan_text

_EXAMPLES = """\
MODULE:FUNCTION is called without arguments and returns (transformation, parameters, logical axes);
the parameters may be jax.ShapeDtypeStructs. The devices of the mesh need not exist.

examples:
  opt-partition explain train:optimizer
  opt-partition plan train:optimizer --mesh data=8,model=4 --rules rules.toml --zero data

rules.toml, in order of precedence, with "" for no mesh axis:
  rules = [["mlp", "model"], ["embed", ["data", "fsdp"]], ["layers", ""]]
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with 2 after a message for invalid input."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    job = _load_job(parser, arguments.target)
    try:
        text = _explain(arguments, job) if arguments.command == "explain" else _plan(arguments, job)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader may close a pipe early, as `head` does
        sys.stderr.close()  # else Python complains at its exit


def _parser() -> argparse.ArgumentParser:
    style: dict[str, Any] = {
        "epilog": _EXAMPLES,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    what = "Explain and plan the sharding of an optimizer state."
    parser = argparse.ArgumentParser(prog="opt-partition", description=what, **style)
    named_version = f"%(prog)s {version('opt-partition')}"
    parser.add_argument("--version", action="version", version=named_version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain|plan")
    what = "Show which parameter dimension each dimension of the state follows, and why."
    explain_parser = commands.add_parser("explain", help=what, description=what, **style)
    what = "Show the bytes per device of parameters, gradients, accumulators and optimizer state."
    plan_parser = commands.add_parser("plan", help=what, description=what, **style)
    for command in (explain_parser, plan_parser):
        command.add_argument("target", metavar="MODULE:FUNCTION")
        strict = "fail if axes could not be determined, or ZeRO leaves state replicated"
        command.add_argument("--strict", action="store_true", help=strict)
        command.add_argument("--json", action="store_true", help="print JSON")
    add = plan_parser.add_argument
    mesh = "AXIS=SIZE,..."
    add("--mesh", metavar=mesh, required=True, type=parse_mesh, help="e.g. data=8,model=4")
    add("--rules", metavar="FILE", required=True, type=read_rules, help="TOML file; see below")
    add("--zero", metavar="AXIS,...", help="mesh axes to shard the state over (ZeRO), e.g. data")
    level = "with --zero: 1 extends the state, 2 gradients and accumulators too (default: 1)"
    add("--zero-level", type=int, choices=(1, 2), default=1, help=level)
    add("--grad-dtype", metavar="DTYPE", help="dtype of gradients (default: the parameters')")
    add("--accumulate", metavar="DTYPE", help="plan gradient accumulators of this dtype too")
    add("--all", action="store_true", help="show everything instead of what fits a screen")
    picture = "also draw the plan to a file, e.g. plan.png or plan.svg (needs matplotlib)"
    add("--picture", metavar="FILE", help=picture)
    return parser


def _explain(arguments: argparse.Namespace, job: Any) -> str:
    explanation = explain(*job, strict=arguments.strict)
    return explanation.to_json() if arguments.json else str(explanation)


def _plan(arguments: argparse.Namespace, job: Any) -> str:
    tx, params, param_axes = job
    with warnings.catch_warnings(record=True) as caught:
        plan = memory_plan(
            tx,
            params,
            param_axes,
            arguments.rules,
            arguments.mesh,
            zero=arguments.zero and arguments.zero.split(","),
            zero_level=arguments.zero_level,
            grad_dtype=arguments.grad_dtype,
            accumulate=arguments.accumulate,
            strict=arguments.strict,
        )
    for warning in caught:
        print(f"opt-partition: warning: {warning.message}", file=sys.stderr)
    if arguments.picture is not None:
        plan.plot().savefig(arguments.picture)
    return plan.to_json() if arguments.json else plan_text(plan, everything=arguments.all)


def _load_job(parser: argparse.ArgumentParser, target: str) -> Any:
    """Calls `MODULE:FUNCTION` and returns its transformation, parameters and logical axes."""
    # As for `python -m`: an installed script would not find modules in the current directory.
    sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        job = pkgutil.resolve_name(target)()
    if not isinstance(job, tuple | list) or len(job) != 3:
        parser.error(
            f"`{target}` must return (transformation, parameters, logical axes); it returned {job}"
        )
    return job


def parse_mesh(text: str) -> AbstractMesh:
    """Returns the mesh of a text such as `data=8,model=4`."""
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {name: int(size) for name, _, size in pairs if size.isdecimal()}
    if len(sizes) < len(pairs) or 0 in sizes.values():
        message = f"expected different axes with sizes, AXIS=SIZE,..., found {text!r}"
        raise argparse.ArgumentTypeError(message)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def read_rules(path: str) -> list[Any]:
    """Reads pairs from the value of `rules` in a TOML file; no mesh axis is `''`."""
    try:
        pairs = tomllib.loads(Path(path).read_text(encoding="utf-8"))["rules"]
    except (OSError, ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"`rules = [...]` cannot be read: {error!r}") from error
    # `logical_to_mesh` checks them.
    return [(pair[0], pair[1] or None) if len(pair) == 2 else pair for pair in pairs]


if __name__ == "__main__":
    main()
