"""`opt-checkpoint`: looks at checkpoints, checks and converts them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from opt_core.errors import OptimizerError
from opt_core.extend import KINDS, LeafInfo, abstract, leaf_bytes, shown
from opt_core.json_records import record_data

from opt_checkpoint._cli.inputs import (
    ACTIONS,
    InputError,
    find_checkpoints,
    find_steps,
    make_optimizer,
    parse_rule,
    parse_step,
    parse_writers,
)
from opt_checkpoint._cli.text import amount, one_line, say, say_folded, say_lines, say_table
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.foreign import ForeignStep, open_foreign
from opt_checkpoint._disk.saved_step import SavedStep
from opt_checkpoint._disk.steps import check_new
from opt_checkpoint._disk.storage import Record
from opt_checkpoint._legacy.restore import restore_legacy
from opt_checkpoint._targets.restore import plan_restore
from opt_checkpoint._targets.view import view_of
from opt_checkpoint.errors import CheckpointError, DamagedError, MissingError

OK, DIFFERENT, WRONG = 0, 1, 2
_LONG = 600  # of an error that lists every leaf


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: success. 1: the checkpoints differ, the plan is refused, or a checkpoint that
    is there is damaged. 2: the input is wrong: a folder, step, function or rule does not exist, or
    `convert` fails because of the file, the optimizer or the folder.
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
    rows, code = [("step", "leaves", "size", "optimizer")], OK
    for number, place in find_steps(options.root).items():
        try:
            source = place.open()
            count, size = str(len(source.schema.leaves)), _size(source.schema.leaves)
            rows.append((number, count, size, _optimizer(source)))
        except CheckpointError as error:
            rows.append((number, "", "", f"{type(error).__name__}: {one_line(error)}"))
            code = DIFFERENT
    if len(rows) == 1:
        raise InputError(f"`{Path(options.root)}` holds no checkpoints")
    say_table(rows, ">>><")
    return code


def _show(options: argparse.Namespace) -> int:
    source = _latest(options.checkpoint, options)
    schema = source.schema
    metadata = source.metadata if isinstance(source, SavedStep) else None
    if options.json:
        scalars = {x.name: _record(source, x).scalar for x in schema.leaves if x.dtype == "python"}
        print(json.dumps(record_data(schema) | {"metadata": metadata, "scalars": scalars}))
        return OK
    step = f"step {source.step}, " if isinstance(source, SavedStep) else ""
    versions = ", ".join(f"{name} {version}" for name, version in schema.versions.items())
    say(f"{source.path}:")
    say(f"{step}{len(schema.leaves)} leaves, {_size(schema.leaves)}")
    say_folded(f"written by {versions or 'another program'}")
    say_folded(f"optimizer: {_optimizer(source)}")
    for group, members in schema.groups.items():
        say_folded(f"group {group}: {len(members)} parameters")
    if metadata is not None:
        print(f"metadata: {json.dumps(metadata)}")
    rows = [("name", "shape", "dtype", "size", "digest", "value")]
    for leaf in schema.leaves:
        described = leaf.name, str(list(leaf.shape)), leaf.dtype, _size([leaf])
        rows.append((*described, _record(source, leaf).digest or "", _value(source, leaf)))
    say_table(rows, "<<<><>")
    return OK


def _diff(options: argparse.Namespace) -> int:
    lines = list(_differences(_latest(options.old, options), _latest(options.new, options)))
    for line in lines:
        say(line)
    return DIFFERENT if lines else OK


def _differences(old: SavedStep | ForeignStep, new: SavedStep | ForeignStep) -> Iterator[str]:
    before, after = old.schema.by_name, new.schema.by_name
    pairs = [(f"optimizer: {_optimizer(old)}", f"optimizer: {_optimizer(new)}")]
    pairs += [(_described(before.get(x)), _described(after.get(x))) for x in {**before, **after}]
    for (was, now), leaf in zip(pairs, [None, *{**before, **after}.values()], strict=True):
        if was != now:
            yield from (f"{sign} {text}" for sign, text in (("-", was), ("+", now)) if text)
        elif leaf is not None and _differ(old, new, leaf):
            values = (_value(old, before[leaf.name]), _value(new, leaf))
            yield f"~ {leaf.name}: {' -> '.join(values) if all(values) else 'other values'}"


def _described(leaf: LeafInfo | None) -> str:
    return "" if leaf is None else f"{leaf.name} {shown(leaf)}"


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


def _plan(options: argparse.Namespace) -> int:
    target = make_optimizer(options.function, allocate=options.allocate)
    source = _latest(options.checkpoint, options)
    if isinstance(source, ForeignStep) and options.written_by is None:
        raise InputError(
            f"`{source.path}` does not say which optimizer wrote it: give `--written-by "
            "MODULE:FUNCTION`"
        )
    plan = plan_restore(source, target, allow=options.allow, rules=options.rule)
    if options.json:
        print(json.dumps(plan.to_data()))
    else:
        names = [*source.schema.by_name, *(row.leaf.name for row in plan.rows)]
        say_lines(plan.table() if options.all else str(plan), names)
        if plan.missing_words:
            say(f"To admit what is marked `!`: --allow {' '.join(sorted(plan.missing_words))}")
    return OK if plan.is_ok else DIFFERENT


def _verify(options: argparse.Namespace) -> int:
    code = OK
    for place in (place for text in options.checkpoint for place in find_checkpoints(text)):
        try:
            source = place.open()
            _read_all(source)
        except (InputError, MissingError):
            raise
        except CheckpointError as error:
            say(f"{place.name}: {type(error).__name__}: {one_line(error)}")
            code = DIFFERENT
            continue
        unchecked = "" if isinstance(source, SavedStep) else ", no digests to compare"
        say(f"{place.name}: ok, {len(source.schema.leaves)} leaves{unchecked}")
    return code


def _read_all(source: SavedStep | ForeignStep) -> None:
    """Reads all leaves, but not at once: a checkpoint may be larger than memory."""
    if isinstance(source, SavedStep):
        if error := source.validate().error:
            raise DamagedError(error)
    else:
        for leaf in source.schema.leaves:
            source.read({leaf.name: abstract(leaf)})


def _convert(options: argparse.Namespace) -> int:
    path = Path(options.file)
    if not os.path.exists(options.file):
        if "@" not in options.file:
            raise InputError(f"`{options.file:.200}` is not a file")
        path = find_checkpoints(options.file)[-1].path
    made = make_optimizer(options.function, allocate=True)
    try:
        if path.is_dir():
            target = plan_restore(open_foreign(path, written_by=made), made).apply()
        else:
            view = view_of(made)
            writers = parse_writers(options.written_by)
            optimizer = restore_legacy(view.optimizer, path, written_by=writers)
            target = view.put_back(optimizer, view.others)
        restored = view_of(target).optimizer
        step = int(restored.state.step) if options.step is None else options.step
        check_new(Path(options.root), step)  # before anything is touched there
        with Checkpointer(options.root) as checkpointer:
            checkpointer.save(step, target, metadata={"converted_from": path.name})
    except OptimizerError as error:
        raise InputError(str(error)) from error
    say(f"{Path(options.root) / str(step)}: {len(jax.tree.leaves(restored))} leaves")
    return OK


def _latest(text: str, options: argparse.Namespace) -> SavedStep | ForeignStep:
    return find_checkpoints(text)[-1].open(options.written_by)


def _optimizer(source: SavedStep | ForeignStep) -> str:
    made = source.schema.transformations
    names = (":".join(filter(None, ("/".join(x.group), x.name))) for x in made)
    return ", ".join(names) or "unknown"


def _size(leaves: Sequence[LeafInfo]) -> str:
    return amount(sum(map(leaf_bytes, leaves)))


def _record(source: SavedStep | ForeignStep, leaf: LeafInfo) -> Record:
    """What a manifest says about a leaf; an empty record without one."""
    return source.manifest.records[leaf.name] if isinstance(source, SavedStep) else Record("array")


def _value(source: SavedStep | ForeignStep, leaf: LeafInfo) -> str:
    """The value of a leaf if the schema or the manifest has it, otherwise empty."""
    if leaf.dtype == "python":
        return repr(_record(source, leaf).scalar)
    return "" if leaf.value is None else str(leaf.value)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="opt-checkpoint",
        description="Look at checkpoints, check and convert them. RUN is a folder of steps. "
        "CHECKPOINT is a step: its own folder, RUN@STEP, or RUN for its latest; where it has "
        "several items, the folder of one.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('opt-checkpoint')}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[..., int], text: str, **places: str) -> Callable[..., argparse.Action]:
        command = commands.add_parser(run.__name__[1:], help=text, description=text)
        command.set_defaults(run=run)
        for place, metavar in places.items():
            command.add_argument(place, metavar=metavar)
        return command.add_argument

    add(_ls, "list the steps of a run", root="RUN")
    text = "show what a checkpoint holds, and who wrote it"
    show = add(_show, text, checkpoint="CHECKPOINT")
    text = "show how two checkpoints differ; exit code 1 if they do"
    diff = add(_diff, text, old="OLD", new="NEW")
    text = "show what restoring into an optimizer would do; exit code 1 if it is refused"
    plan = add(_plan, text, checkpoint="CHECKPOINT")
    verify = add(_verify, "read everything and compare the digests")
    verify("checkpoint", metavar="CHECKPOINT", nargs="+", help="RUN means all steps")
    convert = add(_convert, "make a step of this package of what others wrote")
    text = "a file of flax.optim, TrainState or T5X; or a step of Orbax"
    convert("file", metavar="SOURCE", help=text)
    convert("root", metavar="RUN", help="where the step goes")
    for command in (plan, convert):
        text = "takes nothing, returns an optimizer"
        command("function", metavar="MODULE:FUNCTION", help=text)
    for command in (show, diff, plan):
        text = "of another program's checkpoint: makes the optimizer that wrote it"
        command("--written-by", metavar="MODULE:FUNCTION", help=text)
    for command in (show, plan):
        command("--json", action="store_true", help="all that is known, as JSON")
    kinds: Any = {"choices": sorted(KINDS), "nargs": "+", "action": "extend", "default": []}
    text = f"changes that are admitted: {', '.join(sorted(KINDS))}"
    plan("--allow", metavar="KIND", help=text, **kinds)
    rules: Any = {"type": parse_rule, "action": "append", "default": []}
    plan("--rule", metavar="PATTERN=ACTION", help=f"what to do with leaves: {ACTIONS}", **rules)
    plan("--all", action="store_true", help="a line for every leaf")
    text = "run the function instead of tracing it for its shapes"
    plan("--allocate", action="store_true", help=text)
    text = "which optimizer of flax.optim wrote it, such as Adam; for groups, each by its name"
    convert("--written-by", nargs="+", default=(), metavar="[GROUP=]NAME", help=text)
    convert("--step", type=parse_step, help="the step to save it as (default: its own)")
    return parser
