"""`opt-checkpoint`: looks at checkpoints and checks them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from opt_core.errors import OptimizerError
from opt_core.extend import (
    KINDS,
    LeafInfo,
    abstract,
    aligned,
    leaf_bytes,
    record_data,
)

from opt_checkpoint._foreign import ForeignStep, open_foreign, open_tree
from opt_checkpoint._manifest import foreign_steps, is_orbax, item_with_manifest, list_steps
from opt_checkpoint._step import SavedStep, open_step
from opt_checkpoint._targets import plan_restore
from opt_checkpoint.errors import CheckpointError, ForeignError, LoadError, MissingError

_OK, _REFUSED, _WRONG = 0, 1, 2
_LONG = 600  # of an error that lists every leaf


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0: success. 1: the plan is refused, or a checkpoint that is there is damaged. 2: the input is
    wrong: a folder, step, function or rule does not exist.
    """
    try:
        options = _parser().parse_args(argv)
        code: int = options.run(options)
    except (ForeignError, LoadError, MissingError, TypeError) as error:
        return _failed(error, _WRONG)
    except (OptimizerError, ValueError) as error:
        return _failed(error, _REFUSED if isinstance(error, OptimizerError) else _WRONG)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return _OK
    except OSError as error:
        return _failed(f"`{error.filename!s:.200}`: {error.strerror or error}", _WRONG)
    return code


def _failed(error: object, code: int) -> int:
    text = _one_line(error)
    text = text if len(text) <= _LONG else f"{text[:_LONG]} ..."
    print(f"opt-checkpoint: error: {text}", file=sys.stderr)  # which escapes what it cannot encode
    return code


# Commands


def _ls(options: argparse.Namespace) -> int:
    rows, code = [("step", "leaves", "size", "optimizer")], _OK
    for number, path in _steps(options.root).items():
        try:
            source = _open(path)
            count, size = str(len(source.schema.leaves)), _size(source.schema.leaves)
            rows.append((str(number), count, size, _optimizer(source)))
        except CheckpointError as error:
            rows.append((str(number), "", "", f"{type(error).__name__}: {_one_line(error)}"))
            code = _REFUSED
    if len(rows) == 1:
        raise ValueError(f"`{Path(options.root)}` holds no checkpoints")
    _say_table(rows, ">>><")
    return code


def _show(options: argparse.Namespace) -> int:
    source = _latest(options)
    schema, step, metadata = source.schema, "", None
    digests: Mapping[str, str] = {}
    if isinstance(source, SavedStep):
        step, metadata = f"step {source.step}, ", source.metadata
        digests = source.digests
    if options.json:
        print(json.dumps(record_data(schema) | {"metadata": metadata}))
        return _OK
    versions = ", ".join(f"{name} {version}" for name, version in schema.versions.items())
    _say(f"{source.path}:")
    _say(f"{step}{len(schema.leaves)} leaves, {_size(schema.leaves)}")
    _say(f"written by {versions or 'another program'}")
    _say(f"optimizer: {_optimizer(source)}")
    for group, members in schema.groups.items():
        _say(f"group {group}: {len(members)} parameters")
    if metadata is not None:
        print(f"metadata: {json.dumps(metadata)}")
    rows = [("name", "shape", "dtype", "size", "digest", "value")]
    for leaf in schema.leaves:
        value = "" if leaf.value is None else repr(leaf.value)
        described = leaf.name, str(list(leaf.shape)), leaf.dtype, _size([leaf])
        rows.append((*described, digests.get(leaf.name, ""), value))
    _say_table(rows, "<<<><>")
    return _OK


def _plan(options: argparse.Namespace) -> int:
    target = _optimizer_of(options.function, allocate=options.allocate)
    source = _latest(options)
    if isinstance(source, ForeignStep) and options.written_by is None:
        raise ValueError(
            f"`{source.path}` does not say which optimizer wrote it: give `--written-by "
            "MODULE:FUNCTION`"
        )
    rules = () if options.rules is None else _resolved(options.rules)
    plan = plan_restore(source, target, allow=options.allow, rules=rules)
    if options.json:
        print(json.dumps(plan.to_data()))
        return _OK if plan.is_ok else _REFUSED
    text = plan.table() if options.all else str(plan)
    for name in [*source.schema.by_name, *(row.leaf.name for row in plan.rows)]:
        text = text.replace(name, _printable(name))  # a name may hold line breaks
    for line in text.split("\n"):
        _say(line)
    if plan.missing_words:
        _say(f"To admit what is marked `!`: --allow {' '.join(sorted(plan.missing_words))}")
    return _OK if plan.is_ok else _REFUSED


def _verify(options: argparse.Namespace) -> int:
    code = _OK
    for path in (path for text in options.checkpoint for path in _checkpoints(text)):
        try:
            source = _open(path)
            if isinstance(source, ForeignStep):
                for leaf in source.schema.leaves:  # they may be larger than memory together
                    source.read({leaf.name: abstract(leaf)})
            else:
                source.validate()
        except MissingError:
            raise
        except CheckpointError as error:
            _say(f"{path}: {type(error).__name__}: {_one_line(error)}")
            code = _REFUSED
            continue
        unchecked = "" if isinstance(source, SavedStep) else ", no digests to compare"
        _say(f"{path}: ok, {len(source.schema.leaves)} leaves{unchecked}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opt-checkpoint",
        description="Look at checkpoints and check them. RUN is a folder of steps. CHECKPOINT is "
        "the folder of a step, or RUN for its latest; where a step has several items, the folder "
        "of one.",
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
    text = "show what restoring into an optimizer would do; exit code 1 if it is refused"
    plan = add(_plan, text, checkpoint="CHECKPOINT", function="MODULE:FUNCTION")
    verify = add(_verify, "read everything and compare the digests")
    verify("checkpoint", metavar="CHECKPOINT", nargs="+", help="RUN means all steps")
    for command in (show, plan):
        text = "of another program's checkpoint: takes nothing, returns the optimizer that wrote it"
        command("--written-by", metavar="MODULE:FUNCTION", help=text)
        command("--json", action="store_true", help="all that is known, as JSON")
    kinds: Any = {"choices": sorted(KINDS), "nargs": "+", "action": "extend", "default": []}
    text = f"changes that are admitted: {', '.join(sorted(KINDS))}"
    plan("--allow", metavar="KIND", help=text, **kinds)
    plan("--rules", metavar="MODULE:NAME", help="pairs of a pattern and an action, as in Python")
    plan("--all", action="store_true", help="a line for every leaf")
    text = "run the function instead of tracing it for its shapes"
    plan("--allocate", action="store_true", help=text)
    return parser


# What is typed: checkpoints, and what Python calls by name


def _open(path: Path, written_by: str | None = None) -> SavedStep | ForeignStep:
    """Opens a checkpoint; without a manifest and `written_by` it is leaves by path."""
    path = path.absolute()  # as Orbax wants it
    if item_with_manifest(path) is not None:
        return open_step(path)
    if written_by is None:
        return open_tree(path)
    return open_foreign(path, written_by=_optimizer_of(written_by))


def _latest(options: argparse.Namespace) -> SavedStep | ForeignStep:
    return _open(_checkpoints(options.checkpoint)[-1], options.written_by)


def _checkpoints(text: str) -> list[Path]:
    """All steps of the folder of a run, or the one whose folder it is."""
    steps = _steps(text)
    return [Path(text)] if is_orbax(Path(text)) or not steps else list(steps.values())


def _steps(text: str) -> dict[int, Path]:
    """The steps of a run, whoever wrote them, by their numbers, the oldest first."""
    root = Path(text)
    if root.is_file():
        raise ValueError(
            f"`{text:.200}` is a file, not a folder: read a msgpack file by "
            "`opt_checkpoint.read_legacy`"
        )
    if not root.is_dir():
        raise ValueError(f"`{text:.200}` is not a folder")
    steps = {number: root / str(number) for number in list_steps(root)}
    for name in foreign_steps(root):
        if (root / name).is_dir() and (digits := re.search("[0-9]+$", name)):
            steps.setdefault(int(digits[0]), root / name)
    return dict(sorted(steps.items()))


def _optimizer_of(target: str, *, allocate: bool = False) -> Any:
    """Calls `MODULE:FUNCTION`, or traces it for the shapes of the optimizer that it returns."""
    function = _resolved(target)
    with _users_code(f"`{target}` failed"):
        return function() if allocate else _abstract(function)


def _resolved(name: str) -> Any:
    """What is called `MODULE:NAME`."""
    if not re.fullmatch("[^:]+:[^:]+", name):
        raise ValueError(f"expected MODULE:NAME, found `{name}`")
    # as with `python -m`; an installed script would not find modules of the current folder
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    with _users_code(f"`{name}` cannot be imported"):
        return pkgutil.resolve_name(name)


def _abstract(function: Any) -> Any:
    """What a function returns, traced; it may return leaves that are abstract already."""
    results: list[Any] = []

    def run() -> Any:
        results.append(function())
        return [x for x in jax.tree.leaves(results[0]) if not isinstance(x, jax.ShapeDtypeStruct)]

    traced = iter(jax.eval_shape(run))
    return jax.tree.map(
        lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else next(traced), results[0]
    )


@contextlib.contextmanager
def _users_code(what: str) -> Iterator[None]:
    """Runs code that is not ours: any exception is a `ValueError` that begins with `what`."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


# What is printed: names in a checkpoint may hold anything, and are escaped


def _printable(text: str) -> str:
    """Returns text with control characters, and what cannot be printed, as Python's escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _one_line(error: object) -> str:
    return _printable(" ".join(str(error).split()))


def _say(line: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(_printable(line).encode(encoding, "backslashreplace").decode(encoding))


def _say_table(rows: Iterable[Sequence[str]], sides: str) -> None:
    for line in aligned([[_printable(cell) for cell in row] for row in rows], sides):
        _say(line)


def _optimizer(source: SavedStep | ForeignStep) -> str:
    acting = source.schema.transformations
    names = (":".join(filter(None, ("/".join(x.group), x.name))) for x in acting)
    return ", ".join(names) or "unknown"


def _size(leaves: Sequence[LeafInfo]) -> str:
    count = sum(map(leaf_bytes, leaves))
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:,.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
