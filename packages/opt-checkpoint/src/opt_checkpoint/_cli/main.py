"""`opt-checkpoint`: looks at checkpoints, checks and converts them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from opt_checkpoint._cli.console import amount, print_table, progress
from opt_checkpoint._cli.inputs import (
    InputError,
    check_new_step,
    make_optimizer,
    only_wrong_input,
    open_each,
    open_root,
    open_saved,
    parse_rule,
    parse_step,
    parse_writers,
)
from opt_checkpoint._cli.text import one_line, printable_plan, say
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.saved_step import SavedStep
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: done, and all is well. 1: the checkpoints differ, the plan is refused, or a checkpoint that
    is there is damaged. 2: the input is wrong: there is no such folder, step, function or rule, or
    `convert` cannot do it, whatever is wrong with the file, the optimizer or the folder.
    """
    options = _parser().parse_args(argv)
    try:
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
    checkpointer, rows, code = open_root(options.root), [], OK
    for step in checkpointer.steps():
        try:
            saved = checkpointer.at(step)
            leaves = saved.schema.leaves
        except CheckpointError as error:
            rows.append([str(step), "", "", f"{type(error).__name__}: {one_line(error)}"])
            code = DIFFERENT
            continue
        size = sum(map(leaf_bytes, leaves))
        rows.append([str(step), str(len(leaves)), amount(size), _optimizer(saved)])
    columns = ("step", "leaves", "size", "optimizer")
    print_table(columns, rows, right=columns[:3])
    return code


def _show(options: argparse.Namespace) -> int:
    saved = open_saved(options.checkpoint)
    if options.json:
        told = {"metadata": saved.metadata, "scalars": _scalars(saved)}
        print(json.dumps(saved.schema.to_data() | told))
        return OK
    versions = ", ".join(f"{name} {version}" for name, version in saved.schema.versions.items())
    size = sum(map(leaf_bytes, saved.schema.leaves))
    say(f"{saved.path}: step {saved.step}, {len(saved.schema.leaves)} leaves, {amount(size)}")
    say(f"written by {versions}")
    say(f"optimizer: {_optimizer(saved)}")
    for group, members in saved.schema.groups.items():
        say(f"group {group}: {len(members)} parameters")
    if saved.metadata is not None:
        print(f"metadata: {json.dumps(saved.metadata)}")
    rows = [
        [
            leaf.name,
            str(list(leaf.shape)),
            leaf.dtype,
            amount(leaf_bytes(leaf)),
            saved.manifest.records[leaf.name].digest or "",
            _value(saved, leaf),
        ]
        for leaf in saved.schema.leaves
    ]
    print_table(
        ("name", "shape", "dtype", "size", "digest", "value"), rows, right=("size", "value")
    )
    return OK


def _diff(options: argparse.Namespace) -> int:
    lines = list(_differences(open_saved(options.old), open_saved(options.new)))
    for line in lines:
        say(line)
    return DIFFERENT if lines else OK


def _differences(old: SavedStep, new: SavedStep) -> Iterator[str]:
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
        elif _bits(old, name) != _bits(new, name):
            values = (_value(old, before[name]), _value(new, after[name]))
            yield f"~ {name}: {' -> '.join(values) if all(values) else 'other values'}"


def _plan(options: argparse.Namespace) -> int:
    target = make_optimizer(options.function, allocate=options.allocate)
    plan = plan_restore(
        open_saved(options.checkpoint),
        target,
        allow=options.allow,
        rules=[parse_rule(text) for text in options.rule],
    )
    if options.json:
        print(json.dumps(plan.to_data()))
    else:
        shown = printable_plan(plan)
        for line in (shown.table() if options.all else str(shown)).split("\n"):
            say(line)
    return OK if plan.is_ok else DIFFERENT


def _verify(options: argparse.Namespace) -> int:
    code = OK
    for text in options.checkpoint:
        for place, opened in open_each(text):
            try:
                say(f"{place}: ok, {_verify_step(opened())} leaves")
            except MissingError:
                raise
            except CheckpointError as error:
                say(f"{place}: {type(error).__name__}: {one_line(error)}")
                code = DIFFERENT
    return code


def _verify_step(saved: SavedStep) -> int:
    leaves = saved.schema.leaves
    with progress(sum(map(leaf_bytes, leaves))) as advance:
        for chunk in _chunks(leaves):
            saved.read({leaf.name: abstract(leaf) for leaf in chunk})
            advance(chunk[-1].name, sum(map(leaf_bytes, chunk)))
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
    if not os.path.isfile(path):
        raise InputError(f"`{options.file:.200}` is no file")
    step = None if options.step is None else parse_step(options.step)
    view = view_of(make_optimizer(options.function, allocate=True))
    with only_wrong_input():
        optimizer = restore_legacy(
            view.optimizer, path, written_by=parse_writers(options.written_by)
        )
        step = int(optimizer.state.step) if step is None else step
        check_new_step(options.root, step)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(optimizer))
        with progress(size) as advance, Checkpointer(options.root) as checkpointer:
            target = view.put_back(optimizer, view.others)
            checkpointer.save(step, target, metadata={"converted_from": path.name})
            checkpointer.wait()
            advance(path.name, size)
    say(f"{Path(options.root) / str(step)}: {len(jax.tree.leaves(optimizer))} leaves")
    return OK


def _optimizer(saved: SavedStep) -> str:
    names = []
    for found in saved.schema.transformations:
        group = "/".join(found.group)
        names.append(f"{group}:{found.name}" if group else found.name)
    return ", ".join(names) or "unknown"


def _scalars(saved: SavedStep) -> dict[str, Any]:
    """The Python scalars among the extras, by name."""
    records = saved.manifest.records
    return {x.name: records[x.name].scalar for x in saved.schema.leaves if x.dtype == "python"}


def _value(saved: SavedStep, leaf: LeafInfo) -> str:
    """The value of a leaf where the manifest has it, otherwise nothing."""
    if leaf.dtype == "python":
        return repr(saved.manifest.records[leaf.name].scalar)
    return "" if leaf.value is None else str(leaf.value)


def _bits(saved: SavedStep, name: str) -> tuple[str | None, str]:
    """What is equal where two leaves are, to the bit; `1`, `1.0` and `True` are three values."""
    record = saved.manifest.records[name]
    return record.digest, repr(record.scalar)


def _described(leaf: LeafInfo) -> str:
    return f"{leaf.name} {leaf.dtype}{list(leaf.shape)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opt-checkpoint",
        description="Look at checkpoints, check and convert them. CHECKPOINT is the folder of a "
        "run (its latest step), ROOT@STEP, or the folder of a step.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ls = commands.add_parser("ls", help="the steps in the folder of a run")
    ls.add_argument("root", metavar="ROOT")
    ls.set_defaults(run=_ls)

    show = commands.add_parser("show", help="what a checkpoint holds, and who wrote it")
    show.add_argument("checkpoint", metavar="CHECKPOINT")
    show.add_argument("--json", action="store_true", help="all that is known, as JSON")
    show.set_defaults(run=_show)

    diff = commands.add_parser("diff", help="how two checkpoints differ; exit code 1 if they do")
    diff.add_argument("old", metavar="OLD")
    diff.add_argument("new", metavar="NEW")
    diff.set_defaults(run=_diff)

    plan = commands.add_parser(
        "plan", help="what restoring into an optimizer would do; exit code 1 if it is refused"
    )
    plan.add_argument("checkpoint", metavar="CHECKPOINT")
    plan.add_argument(
        "function", metavar="MODULE:FUNCTION", help="takes nothing, returns an optimizer"
    )
    plan.add_argument(
        "--allow",
        nargs="+",
        action="extend",
        default=[],
        choices=sorted(KINDS),
        help="changes that are admitted",
    )
    plan.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=ACTION",
        help="what to do with leaves: initialise, keep, drop, cast, reshape, rename:SOURCE, "
        "stack:SOURCE[:AXIS], unstack:SOURCE:INDEX[:AXIS], pad:AXIS:SIZE",
    )
    plan.add_argument("--all", action="store_true", help="a line for every leaf")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    plan.add_argument(
        "--allocate",
        action="store_true",
        help="run the function instead of tracing it for its shapes",
    )
    plan.set_defaults(run=_plan)

    verify = commands.add_parser("verify", help="read everything and compare the digests")
    verify.add_argument("checkpoint", metavar="CHECKPOINT", nargs="+", help="a run means all steps")
    verify.set_defaults(run=_verify)

    convert = commands.add_parser(
        "convert", help="turn a file of flax.optim, TrainState or T5X into a checkpoint"
    )
    convert.add_argument("file", metavar="FILE", help="msgpack")
    convert.add_argument("root", metavar="ROOT", help="where the checkpoint goes")
    convert.add_argument(
        "function", metavar="MODULE:FUNCTION", help="takes nothing, returns an optimizer"
    )
    convert.add_argument(
        "--written-by",
        nargs="+",
        default=(),
        metavar="[GROUP=]NAME",
        help="which optimizer of flax.optim wrote it, such as Adam; for groups, each by its name",
    )
    convert.add_argument("--step", help="the step to save it as (default: its own)")
    convert.set_defaults(run=_convert)
    return parser
