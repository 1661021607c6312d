"""The command line: `opt-partition explain|plan MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from opt_partition._cli_inputs import (
    InputError,
    foreign_code,
    load_job,
    parse_mesh,
    read_rules,
    reason,
)
from opt_partition._display import (
    byte_cells,
    collapse,
    dtype_name,
    format_table,
    human_bytes,
    join_entries,
    join_ints,
    pattern,
    words,
)
from opt_partition._explain import Explanation, Row, explain
from opt_partition._layout import Layout, LeafLayout
from opt_partition._memory_plan import memory_plan
from opt_partition._plan import MemoryPlan
from opt_partition._plan_text import plan_text

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
        with _standard_output():
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
    _add_json(command)


def _add_plan(commands: Any) -> None:
    text = "Show the bytes per device of parameters, gradients, accumulators and optimizer state."
    command = _add_command(commands, "plan", text, needs_mesh=True)
    level = "with --zero: 1 extends the state, 2 gradients and accumulators too (default: 1)"
    dtype = "dtype of the gradients (default: the parameters')"
    accumulate = "plan gradient accumulators too (default dtype: float32 or wider)"
    command.add_argument("--zero-level", type=int, choices=(1, 2), default=1, help=level)
    command.add_argument("--grad-dtype", metavar="DTYPE", help=dtype)
    command.add_argument("--accumulate", metavar="DTYPE", nargs="?", const=True, help=accumulate)
    picture = "draw the plan to a file, e.g. plan.png or plan.svg (needs matplotlib)"
    _add_json(command).add_argument("--picture", metavar="FILE", help=picture)


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
    mesh = "the mesh, e.g. data=8,model=4"
    rules = "JSON or TOML file with pairs of a logical name and a mesh axis"
    zero = "mesh axes to shard the state over (ZeRO), e.g. data"
    strict = "fail if axes could not be determined, or ZeRO leaves state replicated"
    every = "show every leaf, field and group instead of what fits a screen"
    command.add_argument("target", metavar="MODULE:FUNCTION", help="function that returns the job")
    command.add_argument("--mesh", metavar="AXIS=SIZE,...", required=needs_mesh, help=mesh)
    command.add_argument("--rules", metavar="FILE", required=needs_mesh, help=rules)
    command.add_argument("--zero", metavar="AXIS,...", help=zero)
    command.add_argument("--strict", action="store_true", help=strict)
    command.add_argument("--all", action="store_true", help=every)
    return command


def _add_json(command: Any) -> Any:
    """Adds the other outputs than a table, of which only one can be asked for."""
    output = command.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    return output


def _run(arguments: argparse.Namespace) -> None:
    if (arguments.mesh is None) != (arguments.rules is None):
        raise InputError("`--mesh` and `--rules` must be given together")
    if arguments.zero is not None and arguments.mesh is None:
        raise InputError("`--zero` needs `--mesh` and `--rules`")
    # Validate cheap inputs before importing the user's program.
    mesh = None if arguments.mesh is None else parse_mesh(arguments.mesh)
    rules = None if arguments.rules is None else read_rules(arguments.rules)
    options: dict[str, Any] = {"strict": arguments.strict}
    if arguments.zero is not None:
        options["zero"] = tuple(axis.strip() for axis in arguments.zero.split(","))
    if arguments.command == "plan":
        options |= {
            "zero_level": arguments.zero_level,
            "grad_dtype": arguments.grad_dtype,
            "accumulate": arguments.accumulate,
        }
    job = load_job(arguments.target)
    if mesh is None or rules is None:
        with foreign_code(f"`{arguments.target}`"):
            explanation = explain(*job, strict=arguments.strict)
        text = explanation.to_json() if arguments.json else _table(explanation, arguments.all)
        _print(text)
        return
    with foreign_code(f"`{arguments.target}`"), warnings.catch_warnings(record=True) as caught:
        plan = memory_plan(*job, rules, mesh, **options)
    for warning in caught:
        print(f"opt-partition: warning: {warning.message}", file=sys.stderr)
    show = _plan_output if arguments.command == "plan" else _layout_output
    _print(show(arguments, plan))


def _plan_output(arguments: argparse.Namespace, plan: MemoryPlan) -> str:
    if arguments.json:
        return plan.to_json()
    if arguments.picture is None:
        return plan_text(plan, everything=arguments.all)
    path, picture = Path(arguments.picture), io.BytesIO()
    try:
        plan.plot().savefig(picture, format=path.suffix[1:] or "png")
        path.write_bytes(picture.getvalue())
    except (ImportError, ValueError, OSError) as error:
        raise InputError(f"`{path}` cannot be written: {reason(error)}") from error
    return f"wrote {path}"


def _layout_output(arguments: argparse.Namespace, plan: MemoryPlan) -> str:
    """Returns a state and how it is sharded."""
    if not arguments.json:
        return _table(plan.explanation, arguments.all, plan.state)
    data = json.loads(plan.explanation.to_json())
    rows = [row for row in plan.to_data()["rows"] if row["kind"] == "state"]
    keys = ("spec", "shard_shape", "bytes_per_device", "notes", "actions")
    for row, planned in zip(data["rows"], rows, strict=True):
        row["layout"] = {key: planned[key] for key in keys}
    return json.dumps({"mesh": dict(plan.mesh.shape), **data}, indent=1)


def _table(explanation: Explanation, every_leaf: bool, layout: Layout | None = None) -> str:
    """Returns the table of an explanation; unless `every_leaf`, repeated leaves are one row."""
    head = ["state", "leaves", "shape", "dtype", "parameter", "axes", "source"]
    head += ["spec", "per device", "bytes per device"] if layout else []
    leaves: Sequence[LeafLayout | None] = layout.rows if layout else [None] * len(explanation.rows)
    pairs = list(zip(explanation.rows, leaves, strict=True))
    groups = (
        [(row.path, [(row, leaf)]) for row, leaf in pairs]
        if every_leaf
        else collapse(pairs, lambda pair: pair[0].path, lambda pair: _alike(*pair))
    )
    rows = []
    for name, group in groups:
        row, leaf = group[0]
        parameter = pattern([member.parameter or "" for member, _ in group])
        shape, axes = join_ints(row.shape), join_entries(row.axes)
        dtype = dtype_name(row.dtype)
        cells = [name, f"{len(group):,}", shape, dtype, parameter, axes, row.source]
        if leaf:
            per_device = sum(member.bytes_per_device for _, member in group if member)
            cells += [join_entries(leaf.spec), *byte_cells(per_device)]
        rows.append((*cells, "; ".join(_notes(row, leaf))))
    size = sum(row.bytes for row in explanation.rows)
    title = (
        f"optimizer state: {len(explanation.rows):,} leaves, {human_bytes(size)} ({size:,} bytes); "
        f"evaluations of `init`: {explanation.evaluations}"
    )
    right = ("leaves", "per device", "bytes per device")
    return f"{title}\n{format_table((*head, 'note'), rows, right, rule=True)}"


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
    """Context in which to write to standard output; ignores a pipe closed by its reader."""
    # None if the process was started with standard output closed.
    if (stream := sys.stdout) is None:
        raise InputError("standard output cannot be written: it is closed")
    try:
        try:
            yield
        finally:
            stream.flush()
    except OSError as error:
        # Flushing the rest when Python exits would fail again, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader may close a pipe early
            raise InputError(f"standard output cannot be written: {reason(error)}") from error


def _print(text: str) -> None:
    """Prints text to standard output."""
    with _standard_output():
        print(text)


def _alike(row: Row, leaf: LeafLayout | None) -> tuple[object, ...]:
    """Returns the key of leaves that share a row of the table."""
    spec = leaf and (leaf.spec, leaf.memory_kind)
    owner = words(row.parameter or "")
    return row.shape, dtype_name(row.dtype), row.axes, row.source, owner, spec, _notes(row, leaf)


def _notes(row: Row, leaf: LeafLayout | None) -> tuple[str, ...]:
    memory = (f"in {leaf.memory_kind}",) if leaf and leaf.memory_kind else ()
    return (*filter(None, [row.note]), *memory, *(leaf.notes if leaf else ()))
