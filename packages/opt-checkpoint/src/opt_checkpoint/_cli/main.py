"""`opt-checkpoint`: looks at checkpoints, checks and converts them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from opt_checkpoint._cli.inputs import (
    ACTIONS,
    InputError,
    check_new_step,
    find_checkpoints,
    find_steps,
    make_optimizer,
    only_wrong_input,
    parse_rule,
    parse_step,
    parse_writers,
)
from opt_checkpoint._cli.text import (
    amount,
    one_line,
    printable_plan,
    say,
    say_folded,
    say_progress,
    say_table,
)
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.foreign import ForeignStep, open_foreign
from opt_checkpoint._disk.saved_step import SavedStep
from opt_checkpoint._disk.storage import Record
from opt_checkpoint._legacy.restore import restore_legacy
from opt_checkpoint._naming.schema import LeafInfo
from opt_checkpoint._planning.functions import abstract
from opt_checkpoint._planning.match import plan_restore
from opt_checkpoint._planning.plan import leaf_bytes
from opt_checkpoint._planning.rules import KINDS
from opt_checkpoint._targets.view import view_of
from opt_checkpoint.errors import CheckpointError, MissingError

OK, DIFFERENT, WRONG = 0, 1, 2
_CHUNK = 256 * 2**20
_LONG = 600  # of an error that lists every leaf


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: done, and all is well. 1: the checkpoints differ, the plan is refused, or a checkpoint that
    is there is damaged. 2: the input is wrong: there is no such folder, step, function or rule, or
    `convert` cannot do it, whatever is wrong with the file, the optimizer or the folder.
    """
    try:
        options = _parser().parse_args(argv)
        code: int = options.run(options)
    except (InputError, MissingError) as error:
        return _failed(error, WRONG)
    except (CheckpointError, ValueError) as error:
        return _failed(error, DIFFERENT if isinstance(error, CheckpointError) else WRONG)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return OK
    except OSError as error:
        return _failed(f"`{error.filename!s:.200}`: {error.strerror or error}", WRONG)
    return code


def _failed(error: object, code: int) -> int:
    text = one_line(error)
    text = text if len(text) <= _LONG else f"{text[:_LONG]} ..."
    print(f"opt-checkpoint: error: {text}", file=sys.stderr)  # which escapes what it cannot encode
    return code


def _ls(options: argparse.Namespace) -> int:
    rows, code = [], OK
    for number, place in find_steps(options.root).items():
        try:
            source = place.open()
            leaves = source.schema.leaves
        except CheckpointError as error:
            rows.append([number, "", "", f"{type(error).__name__}: {one_line(error)}"])
            code = DIFFERENT
            continue
        size = amount(sum(map(leaf_bytes, leaves)))
        rows.append([number, str(len(leaves)), size, _optimizer(source)])
    if not rows:
        raise InputError(f"`{Path(options.root)}` holds no checkpoints")
    columns = ("step", "leaves", "size", "optimizer")
    say_table(columns, rows, right=columns[:3])
    return code


def _show(options: argparse.Namespace) -> int:
    source = _latest(options.checkpoint, options)
    schema = source.schema
    metadata = source.metadata if isinstance(source, SavedStep) else None
    if options.json:
        scalars = {x.name: _record(source, x).scalar for x in schema.leaves if x.dtype == "python"}
        print(json.dumps(schema.to_data() | {"metadata": metadata, "scalars": scalars}))
        return OK
    step = f"step {source.step}, " if isinstance(source, SavedStep) else ""
    size = amount(sum(map(leaf_bytes, schema.leaves)))
    say(f"{source.path}:")
    say(f"{step}{len(schema.leaves)} leaves, {size}")
    versions = ", ".join(f"{name} {version}" for name, version in schema.versions.items())
    say_folded(f"written by {versions or 'another program'}")
    say_folded(f"optimizer: {_optimizer(source)}")
    for group, members in schema.groups.items():
        say_folded(f"group {group}: {len(members)} parameters")
    if metadata is not None:
        print(f"metadata: {json.dumps(metadata)}")
    rows = [
        [
            leaf.name,
            str(list(leaf.shape)),
            leaf.dtype,
            amount(leaf_bytes(leaf)),
            _record(source, leaf).digest or "",
            _value(source, leaf),
        ]
        for leaf in schema.leaves
    ]
    columns = ("name", "shape", "dtype", "size", "digest", "value")
    say_table(columns, rows, right=("size", "value"))
    return OK


def _diff(options: argparse.Namespace) -> int:
    lines = list(_differences(_latest(options.old, options), _latest(options.new, options)))
    for line in lines:
        say(line)
    return DIFFERENT if lines else OK


def _differences(old: SavedStep | ForeignStep, new: SavedStep | ForeignStep) -> Iterator[str]:
    before, after = old.schema.by_name, new.schema.by_name
    if _optimizer(old) != _optimizer(new):
        yield f"- optimizer: {_optimizer(old)}"
        yield f"+ optimizer: {_optimizer(new)}"
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in after:
            yield f"- {_described(before[name])}"
        elif name not in before:
            yield f"+ {_described(after[name])}"
        elif _described(before[name]) != _described(after[name]):
            yield f"- {_described(before[name])}"
            yield f"+ {_described(after[name])}"
        elif _differ(old, new, before[name]):
            values = (_value(old, before[name]), _value(new, after[name]))
            yield f"~ {name}: {' -> '.join(values) if all(values) else 'other values'}"


def _plan(options: argparse.Namespace) -> int:
    target = make_optimizer(options.function, allocate=options.allocate)
    source = _latest(options.checkpoint, options)
    if isinstance(source, ForeignStep) and options.written_by is None:
        raise InputError(
            f"`{source.path}` does not say which optimizer wrote it: give `--written-by "
            "MODULE:FUNCTION`"
        )
    rules = [parse_rule(text) for text in options.rule]
    plan = plan_restore(source, target, allow=options.allow, rules=rules)
    if options.json:
        print(json.dumps(plan.to_data()))
    else:
        shown = printable_plan(plan)
        say_folded(shown.table() if options.all else str(shown))
    return OK if plan.is_ok else DIFFERENT


def _verify(options: argparse.Namespace) -> int:
    code = OK
    for place in (place for text in options.checkpoint for place in find_checkpoints(text)):
        try:
            source = place.open()
            count = _read_all(source)
        except (InputError, MissingError):
            raise
        except CheckpointError as error:
            say(f"{place.name}: {type(error).__name__}: {one_line(error)}")
            code = DIFFERENT
            continue
        unchecked = "" if isinstance(source, SavedStep) else ", no digests to compare"
        say(f"{place.name}: ok, {count} leaves{unchecked}")
    return code


def _read_all(source: SavedStep | ForeignStep) -> int:
    leaves = source.schema.leaves
    total, done = sum(map(leaf_bytes, leaves)), 0
    for chunk in _chunks(leaves):
        source.read({leaf.name: abstract(leaf) for leaf in chunk})
        done += sum(map(leaf_bytes, chunk))
        say_progress(f"{100 * done // max(total, 1):3}% {chunk[-1].name}")
    say_progress("")
    return len(leaves)


def _chunks(leaves: Sequence[LeafInfo]) -> Iterator[list[LeafInfo]]:
    """Some leaves at a time, so that a checkpoint larger than memory can be checked."""
    chunk: list[LeafInfo] = []
    for leaf in leaves:
        if chunk and sum(map(leaf_bytes, (*chunk, leaf))) > _CHUNK:
            yield chunk
            chunk = []
        chunk.append(leaf)
    if chunk:
        yield chunk


def _convert(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if not os.path.exists(options.file):
        raise InputError(f"`{options.file:.200}` is no file")
    number = None if options.step is None else parse_step(options.step)
    made = make_optimizer(options.function, allocate=True)
    with only_wrong_input():
        if os.path.isdir(path):
            target = plan_restore(open_foreign(path, written_by=made), made).apply()
        else:
            view = view_of(made)
            writers = parse_writers(options.written_by)
            optimizer = restore_legacy(view.optimizer, path, written_by=writers)
            target = view.put_back(optimizer, view.others)
        restored = view_of(target).optimizer
        step = int(restored.state.step) if number is None else number
        check_new_step(options.root, step)
        with Checkpointer(options.root) as checkpointer:
            checkpointer.save(step, target, metadata={"converted_from": path.name})
    say(f"{Path(options.root) / str(step)}: {len(jax.tree.leaves(restored))} leaves")
    return OK


def _latest(text: str, options: argparse.Namespace) -> SavedStep | ForeignStep:
    return find_checkpoints(text)[-1].open(options.written_by)


def _optimizer(source: SavedStep | ForeignStep) -> str:
    names = []
    for found in source.schema.transformations:
        group = "/".join(found.group)
        names.append(f"{group}:{found.name}" if group else found.name)
    return ", ".join(names) or "unknown"


def _record(source: SavedStep | ForeignStep, leaf: LeafInfo) -> Record:
    """What a manifest says of a leaf: nothing where there is none."""
    return source.manifest.records[leaf.name] if isinstance(source, SavedStep) else Record("array")


def _value(source: SavedStep | ForeignStep, leaf: LeafInfo) -> str:
    """The value of a leaf where the schema or the manifest has it, otherwise nothing."""
    if leaf.dtype == "python":
        return repr(_record(source, leaf).scalar)
    return "" if leaf.value is None else str(leaf.value)


def _differ(old: SavedStep | ForeignStep, new: SavedStep | ForeignStep, leaf: LeafInfo) -> bool:
    """Whether two leaves of one shape and dtype differ in a bit; `1`, `1.0` and `True` do."""
    if isinstance(old, SavedStep) and isinstance(new, SavedStep):
        first, second = _record(old, leaf), _record(new, leaf)
        return (first.digest, repr(first.scalar)) != (second.digest, repr(second.scalar))
    bits = []
    for source in (old, new):
        read = source.read({leaf.name: abstract(leaf)})[leaf.name]
        bits.append(np.asarray(jax.random.key_data(read) if leaf.is_key else read).tobytes())
    return bits[0] != bits[1]


def _described(leaf: LeafInfo) -> str:
    return f"{leaf.name} {leaf.dtype}{list(leaf.shape)}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="opt-checkpoint",
        description="Look at checkpoints, check and convert them. RUN is a folder of steps. "
        "CHECKPOINT is a step: its own folder, RUN@STEP, or RUN for its latest; where it has "
        "several items, the folder of one.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, **places: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        for place, metavar in places.items():
            command.add_argument(place, metavar=metavar)
        command.set_defaults(run=run, written_by=None)
        return command

    function: Any = {"metavar": "MODULE:FUNCTION", "help": "takes nothing, returns an optimizer"}
    one = {"checkpoint": "CHECKPOINT"}
    add("ls", _ls, "list the steps of a run", root="RUN")
    show = add("show", _show, "show what a checkpoint holds, and who wrote it", **one)
    text = "show how two checkpoints differ; exit code 1 if they do"
    diff = add("diff", _diff, text, old="OLD", new="NEW")
    text = "show what restoring into an optimizer would do; exit code 1 if it is refused"
    plan = add("plan", _plan, text, **one)
    plan.add_argument("function", **function)
    for command in (show, diff, plan):
        command.add_argument(
            "--written-by",
            metavar="MODULE:FUNCTION",
            help="of another program's checkpoint: makes the optimizer that wrote it",
        )
    for command in (show, plan):
        command.add_argument("--json", action="store_true", help="all that is known, as JSON")
    plan.add_argument(
        "--allow",
        nargs="+",
        action="extend",
        default=[],
        choices=sorted(KINDS),
        metavar="KIND",
        help=f"changes that are admitted: {', '.join(sorted(KINDS))}",
    )
    plan.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=ACTION",
        help=f"what to do with leaves: {ACTIONS}",
    )
    plan.add_argument("--all", action="store_true", help="a line for every leaf")
    plan.add_argument(
        "--allocate",
        action="store_true",
        help="run the function instead of tracing it for its shapes",
    )
    verify = add("verify", _verify, "read everything and compare the digests")
    verify.add_argument("checkpoint", metavar="CHECKPOINT", nargs="+", help="RUN means all steps")
    convert = add("convert", _convert, "make a step of this package of what others wrote")
    convert.add_argument(
        "file", metavar="SOURCE", help="a file of flax.optim, TrainState or T5X; or a step of Orbax"
    )
    convert.add_argument("root", metavar="RUN", help="where the step goes")
    convert.add_argument("function", **function)
    convert.add_argument(
        "--written-by",
        nargs="+",
        default=(),
        metavar="[GROUP=]NAME",
        help="which optimizer of flax.optim wrote it, such as Adam; for groups, each by its name",
    )
    convert.add_argument("--step", help="the step to save it as (default: its own)")
    return parser
