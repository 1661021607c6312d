"""What is typed: a checkpoint, a function that makes an optimizer, rules."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from opt_core.extend import Pad, Rename, Rule, Stack, Unstack

from opt_checkpoint._folder import foreign_steps, is_orbax, item_with_manifest, list_steps
from opt_checkpoint._foreign import ForeignStep, open_foreign, open_tree
from opt_checkpoint._step import SavedStep, open_step
from opt_checkpoint._targets import view_of
from opt_checkpoint.errors import ForeignError, LoadError

ACTIONS = (
    "initialise, keep, drop, cast, reshape, rename:SOURCE, stack:SOURCE[:AXIS], "
    "unstack:SOURCE:INDEX[:AXIS] or pad:AXIS:SIZE"
)
_INTEGER = "-?[0-9]{1,18}"  # as one may type it


class InputError(Exception):
    """What is wrong with the input, in one line."""


class Place(NamedTuple):
    """A checkpoint: what to call it, its folder, and the step that it must have been saved as."""

    name: str
    path: Path
    step: int | None = None

    def open(self, written_by: str | None = None) -> SavedStep | ForeignStep:
        """Opens it; without a manifest and `written_by` it is leaves by path."""
        path = self.path.absolute()  # as Orbax wants it
        try:
            if item_with_manifest(path) is not None:
                return open_step(path, step=self.step)
            if written_by is None:
                return open_tree(path)
            return open_foreign(path, written_by=make_optimizer(written_by))
        except LoadError:
            raise InputError(f"`{self.path}` holds no checkpoints") from None
        except ForeignError as error:
            raise InputError(str(error)) from error


def find_checkpoints(text: str) -> list[Place]:
    """Finds all steps of the folder of a run, `RUN@STEP`, or the one whose folder it is."""
    root, at, number = text.rpartition("@")
    if at and number.isascii() and number.isdecimal() and not os.path.exists(text):
        steps = find_steps(root)
        if (short := number.lstrip("0") or "0") in steps:
            return [steps[short]]
        raise InputError(f"`{root}` has no step {number:.20}; it has [{', '.join(steps)}]")
    steps = find_steps(text)
    if is_orbax(Path(text)) or not steps:
        return [Place(text, Path(text))]
    return list(steps.values())


def find_steps(text: str) -> dict[str, Place]:
    """Finds the steps of a run, whoever wrote them, by their numbers, the oldest first."""
    if not os.path.isdir(text or "."):
        raise InputError(f"`{text:.200}` is not a folder")
    root = Path(text)
    places = {str(n): Place(f"{text}@{n}", root / str(n), n) for n in list_steps(root)}
    for name in foreign_steps(root):
        if (root / name).is_dir() and (digits := re.search("[0-9]+$", name)):
            number = str(int(digits[0]))
            places.setdefault(number, Place(f"{text}@{number}", root / name))
    return {number: places[number] for number in sorted(places, key=int)}


def make_optimizer(target: str, *, allocate: bool = False) -> Any:
    """Calls `MODULE:FUNCTION`, or traces it for the shapes of the optimizer that it returns."""
    if not re.fullmatch("[^:]+:[^:]+", target):
        raise InputError(f"expected MODULE:FUNCTION, found `{target}`")
    # as with `python -m`; an installed script would not find modules of the current folder
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    with _users_code(f"`{target}` cannot be imported"):
        function = pkgutil.resolve_name(target)
    with _users_code(f"`{target}` failed"):
        optimizer = function() if allocate else _abstract(function)
    try:
        view_of(optimizer, argument=target)
    except TypeError as error:
        raise InputError(str(error)) from None
    return optimizer


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
    """Runs code that is not ours: any exception is an `InputError` that begins with `what`."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise InputError(f"{what}: {type(error).__name__}: {text}") from error


def parse_rule(text: str) -> Rule:
    r"""Reads `PATTERN=ACTION`. A `Map` needs Python.

    Examples:
      >>> parse_rule(r'(.*)/layers/(.*)=stack:\1/layers_{i}/\2')
      ('(.*)/layers/(.*)', Stack(source='\\1/layers_{i}/\\2', axis=0))
      >>> parse_rule('.*/embedding=pad:0:32128')
      ('.*/embedding', Pad(axis=0, to=32128, value=0))
    """
    pattern, equals, action = text.rpartition("=")
    word, *texts = action.split(":")
    if not (equals and pattern and word):
        raise InputError(f"`--rule` must be PATTERN=ACTION, found `{text:.200}`")
    values: list[Any] = [int(x) if re.fullmatch(_INTEGER, x) else x for x in texts]
    match word, values:
        case ("initialise" | "keep" | "drop" | "cast" | "reshape") as plain, []:
            return pattern, plain
        case "rename", [_]:
            return pattern, Rename(texts[0])
        case "stack", [_] | [_, int()]:
            return pattern, Stack(texts[0], *values[1:])
        case "unstack", [_, int()] | [_, int(), int()]:
            return pattern, Unstack(texts[0], texts[1], *values[2:])
        case "unstack", [_, str(index)] | [_, str(index), int()] if not index.isdecimal():
            return pattern, Unstack(texts[0], index, *values[2:])
        case "pad", [int(), int(size)] if size >= 0:
            return pattern, Pad(*values)
    raise InputError(f"`--rule`: expected {ACTIONS}, found `{action:.200}`")
