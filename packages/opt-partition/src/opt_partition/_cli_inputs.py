"""Inputs of the command line: a function, a mesh, a table of rules."""

from __future__ import annotations

import contextlib
import importlib
import json
import operator
import os
import sys
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from opt_partition.errors import PartitionError

Rule = tuple[str, str | tuple[str, ...] | None]


class InputError(Exception):
    """Invalid input; the message is a single line."""


def load_job(target: str) -> tuple[Any, Any, Any]:
    """Calls `MODULE:FUNCTION` and returns its transformation, parameters and logical axes.

    Output of the module is redirected to standard error, as standard output is for results.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise InputError(f"expected MODULE:FUNCTION, found `{target}`")
    # As for `python -m`: an installed script would not find modules in the current directory.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    with foreign_code(f"`{module_name}` cannot be imported"):
        module = importlib.import_module(module_name)
    try:
        function = operator.attrgetter(name)(module)
    except AttributeError:
        raise InputError(f"`{module_name}` has no function `{name}`") from None
    if not callable(function):
        raise InputError(f"`{target}` is not a function but a {type(function).__name__}")
    with foreign_code(f"`{target}` failed"):
        job = function()
    if not isinstance(job, tuple | list) or len(job) != 3:
        found = f"a {type(job).__name__}"
        found += f" of {len(job)}" if isinstance(job, tuple | list) else ""
        raise InputError(
            f"`{target}` must return (transformation, parameters, logical axes); "
            f"it returned {found}"
        )
    tx, params, param_axes = job
    return tx, params, param_axes


@contextlib.contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Runs user code; converts any exception to an `InputError` that starts with `what`."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except PartitionError as error:
        raise InputError(f"{what}: {_one_line(str(error))}") from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{what}: {type(error).__name__}: {_one_line(str(error))}{_where(error)}"
        ) from error


def parse_mesh(text: str) -> AbstractMesh:
    """Parses `data=8,model=4`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise InputError(
                f"`--mesh` must be axes with sizes, e.g. data=8,model=4; found `{part}` in `{text}`"
            )
        if name in sizes:
            raise InputError(f"`--mesh` contains the axis `{name}` twice: `{text}`")
        sizes[name] = int(size)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def read_rules(path: str) -> list[Rule]:
    """Reads an ordered list of pairs from a JSON or TOML file.

    The list is the value of `rules` in TOML, and the value of `rules` or the whole document in
    JSON. The second item of a pair is a mesh axis, a list of mesh axes, or `""`, `[]` or `null` for
    none.
    """
    file = Path(path)
    if file.suffix not in {".json", ".toml"}:
        raise InputError(f"`--rules` must be a .json or .toml file; found `{path}`")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"`--rules`: `{path}` cannot be read: {reason(error)}") from error
    try:
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"`--rules`: `{path}` is not valid {file.suffix[1:].upper()}: {error}"
        ) from error
    pairs = data.get("rules") if isinstance(data, dict) else data
    if not isinstance(pairs, list):
        raise InputError(
            f'`--rules`: `{path}` must contain a list of pairs, e.g. [["mlp", "model"], '
            '["embed", "fsdp"]], in TOML as `rules = [...]`'
        )
    return [_rule(pair, path) for pair in pairs]


def reason(error: Exception) -> str:
    """Returns why a file could not be read or written, without its name."""
    return getattr(error, "strerror", None) or _one_line(str(error))


def _rule(pair: Any, path: str) -> Rule:
    match pair:
        case [str(name), None | "" | []]:
            return name, None
        case [str(name), str(axis)]:
            return name, axis
        case [str(name), [*axes]] if all(isinstance(axis, str) and axis for axis in axes):
            return name, tuple(axes)
    raise InputError(
        f"`--rules`: in `{path}`, expected a pair of a logical name and a mesh axis, a list of "
        f"mesh axes or null; found {json.dumps(pair, default=str)}"
    )


def _one_line(text: str) -> str:
    """Joins the lines of a message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    joined = ""
    for line in lines:
        between = "" if not joined else " " if joined.endswith((":", ".", ";")) else "; "
        joined += between + line
    return joined


def _where(error: BaseException) -> str:
    """Returns the file and line that raised, unless it is in an installed package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
        and Path(__file__).parent not in Path(frame.filename).parents
        and os.path.exists(frame.filename)
        and not frame.filename.startswith(os.path.dirname(os.__file__))
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
