"""The command line: `opt-partition explain|plan MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import jax

from opt_partition._axes.explain import Explanation, explain
from opt_partition._cli.html import page
from opt_partition._cli.inputs import (
    InputError,
    foreign_code,
    load_job,
    parse_axes,
    parse_dtype,
    parse_mesh,
    read_rules,
)
from opt_partition._cli.outputs import (
    explanation_table,
    print_text,
    standard_output,
    write_text,
)
from opt_partition._cli.pictures import Item, explanation_items, families, plan_items
from opt_partition._display import Table
from opt_partition._memory.memory_plan import memory_plan
from opt_partition._memory.plan import MemoryPlan
from opt_partition._memory.tables import plan_tables

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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are a single line."""

    def print_help(self, file: Any = None) -> None:
        # argparse's own method ignores errors on writing.
        with standard_output():
            print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments; by default those of the process.

    Returns:
      0, or 2 after printing one line to standard error if the input is invalid or standard output
      cannot be written.
    """
    if hasattr(sys.stdout, "reconfigure"):
        # A path may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = _parser().parse_args(argv)
        _run(arguments)
    except InputError as error:
        print(f"opt-partition: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="opt-partition",
        description="Explain and plan the sharding of an optimizer state.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('opt-partition')}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain|plan")
    _add_explain(commands)
    _add_plan(commands)
    return parser


def _add_explain(commands: Any) -> None:
    text = "Show which parameter dimension each dimension of the state follows, and why."
    command = _add_command(commands, "explain", text, needs_mesh=False)
    command.add_argument(
        "--all", action="store_true", help="show a row for every leaf, including repeated layers"
    )


def _add_plan(commands: Any) -> None:
    text = "Show the bytes per device of parameters, gradients, accumulators and optimizer state."
    command = _add_command(commands, "plan", text, needs_mesh=True)
    command.add_argument(
        "--all", action="store_true", help="show all fields, groups and replicated leaves"
    )
    command.add_argument(
        "--zero-level",
        type=int,
        choices=(1, 2),
        default=1,
        help="with --zero: 1 extends the state, 2 gradients and accumulators too (default: 1)",
    )
    command.add_argument(
        "--grad-dtype", metavar="DTYPE", help="dtype of the gradients (default: the parameters')"
    )
    command.add_argument(
        "--accumulate",
        metavar="DTYPE",
        nargs="?",
        const=True,
        help="plan gradient accumulators too (default dtype: float32 or wider)",
    )


def _add_command(commands: Any, name: str, text: str, *, needs_mesh: bool) -> Any:
    """Adds a command with the options common to both."""
    command = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("target", metavar="MODULE:FUNCTION", help="function that returns the job")
    command.add_argument(
        "--mesh", metavar="AXIS=SIZE,...", required=needs_mesh, help="the mesh, e.g. data=8,model=4"
    )
    command.add_argument(
        "--rules",
        metavar="FILE",
        required=needs_mesh,
        help="JSON or TOML file with pairs of a logical name and a mesh axis",
    )
    command.add_argument(
        "--zero", metavar="AXIS,...", help="mesh axes to shard the state over (ZeRO), e.g. data"
    )
    command.add_argument(
        "--strict",
        action="store_true",
        help="fail if axes could not be determined, or ZeRO leaves state replicated",
    )
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--html", metavar="FILE", help="write a self-contained HTML page")
    return command


def _run(arguments: argparse.Namespace) -> None:
    if (arguments.mesh is None) != (arguments.rules is None):
        raise InputError("`--mesh` and `--rules` must be given together")
    if arguments.zero is not None and arguments.mesh is None:
        raise InputError("`--zero` needs `--mesh` and `--rules`")
    # Validate cheap inputs before importing the user's program.
    mesh = None if arguments.mesh is None else parse_mesh(arguments.mesh)
    rules = None if arguments.rules is None else read_rules(arguments.rules)
    zero = None if mesh is None or arguments.zero is None else parse_axes(arguments.zero, mesh)
    options = _plan_options(arguments) if arguments.command == "plan" else {}
    job = load_job(arguments.target)
    if mesh is None or rules is None:
        with foreign_code(f"`{arguments.target}`"):
            explanation = explain(*job, strict=arguments.strict)
        _show_explanation(arguments, explanation, job[1])
        return
    with foreign_code(f"`{arguments.target}`"), warnings.catch_warnings(record=True) as caught:
        plan = memory_plan(*job, rules, mesh, zero=zero, strict=arguments.strict, **options)
    for warning in caught:
        print(f"opt-partition: warning: {warning.message}", file=sys.stderr)
    show = _show_plan if arguments.command == "plan" else _show_layout
    show(arguments, plan)


def _plan_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that only `plan` has."""
    if arguments.zero_level == 2 and arguments.zero is None:
        raise InputError("`--zero-level 2` needs `--zero`, e.g. `--zero data`")
    dtypes = {"grad_dtype": arguments.grad_dtype, "accumulate": arguments.accumulate}
    for name, value in dtypes.items():
        if isinstance(value, str):
            dtypes[name] = parse_dtype(f"--{name.replace('_', '-')}", value)
    return {"zero_level": arguments.zero_level, **dtypes}


def _show_explanation(arguments: argparse.Namespace, explanation: Explanation, params: Any) -> None:
    """Shows a state without a mesh."""
    if arguments.json:
        print_text(explanation.to_json())
        return
    table = explanation_table(explanation, show_all=arguments.all)
    _show(arguments, [table], explanation_items(explanation, params))


def _show_layout(arguments: argparse.Namespace, plan: MemoryPlan) -> None:
    """Shows a state and how it is sharded."""
    if arguments.json:
        data = json.loads(plan.explanation.to_json())
        rows = [row for row in plan.to_data()["rows"] if row["kind"] == "state"]
        keys = ("spec", "shard_shape", "bytes_per_device", "notes", "actions")
        for row, planned in zip(data["rows"], rows, strict=True):
            row["layout"] = {key: planned[key] for key in keys}
        print_text(json.dumps({"mesh": dict(plan.mesh.shape), **data}, indent=1))
        return
    table = explanation_table(plan.explanation, plan.state, show_all=arguments.all)
    items = [item for item in plan_items(plan) if item.field != "grads"]
    _show(arguments, [table], items)


def _show_plan(arguments: argparse.Namespace, plan: MemoryPlan) -> None:
    if arguments.json:
        print_text(plan.to_json())
    elif arguments.all or arguments.html is not None:
        _show(arguments, plan_tables(plan), plan_items(plan))
    else:
        print_text(str(plan))


def _show(arguments: argparse.Namespace, tables: list[Table], items: list[Item]) -> None:
    """Prints tables, or writes them to an HTML page with pictures."""
    if arguments.html is None:
        print_text("\n\n".join(map(str, tables)))
        return
    title = f"{'Memory plan' if arguments.command == 'plan' else 'Optimizer state'} of "
    text = page(
        title + arguments.target,
        f"Shapes and layouts, computed by opt-partition with jax {jax.__version__}.",
        tables,
        families(items),
        has_mesh=arguments.mesh is not None,
    )
    write_text(arguments.html, text)
    print_text(f"wrote {arguments.html}")
