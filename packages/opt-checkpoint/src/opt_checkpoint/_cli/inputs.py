"""What the command line is given: a checkpoint, a function that makes an optimizer, rules."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from opt_core.errors import OptimizerError

from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.saved_step import SavedStep, open_step
from opt_checkpoint._planning.rules import Pad, Rename, Rule, Stack, Unstack
from opt_checkpoint._targets.view import view_of

# Of a number that someone typed.
_DIGITS = 18


class InputError(Exception):
    """What is wrong with the input, in one line."""


def open_root(text: str) -> Checkpointer:
    """Opens the folder of a run for reading.

    Raises:
      InputError: there is no such folder, or no step in it.
    """
    if not os.path.isdir(text or "."):
        raise InputError(f"`{text:.200}` is no folder")
    checkpointer = Checkpointer(text, read_only=True)
    if not checkpointer.steps():
        raise InputError(f"`{Path(text)}` holds no checkpoints")
    return checkpointer


def open_saved(text: str) -> SavedStep:
    """Opens `ROOT` (its latest step), `ROOT@STEP`, or the folder of a step.

    Raises:
      InputError: there is none.
    """
    if _is_step(text):
        return open_step(text)
    if (named := _root_and_step(text)) is not None:
        root, step = named
        checkpointer = open_root(root)
        for found in checkpointer.steps():
            if str(found) == (step.lstrip("0") or "0"):
                return checkpointer.at(found)
        raise InputError(f"`{root}` has no step {step:.20}; it has {checkpointer.steps()}")
    checkpointer = open_root(text)
    return checkpointer.at(checkpointer.steps()[-1])


def open_each(text: str) -> list[tuple[str, Callable[[], SavedStep]]]:
    """Returns what to call each step, and what opens it: all steps of `ROOT`, else the one.

    Raises:
      InputError: there is none.
    """
    if _is_step(text) or _root_and_step(text) is not None:
        return [(text, functools.partial(open_saved, text))]
    checkpointer = open_root(text)
    return [(f"{text}@{s}", functools.partial(checkpointer.at, s)) for s in checkpointer.steps()]


def _is_step(text: str) -> bool:
    """Whether a path is the folder of one step, not that of a run."""
    return os.path.isdir(os.path.join(text, "manifest"))


def _root_and_step(text: str) -> tuple[str, str] | None:
    root, at, step = text.rpartition("@")
    is_number = step.isascii() and step.isdecimal()
    return (root, step) if at and is_number and not os.path.exists(text) else None


def check_new_step(root: str, step: int) -> None:
    """Checks that a step can be saved in a folder; touches nothing.

    Raises:
      InputError: it cannot.
    """
    if not os.path.lexists(root):
        return
    if not os.path.isdir(root):
        raise InputError(f"`{root}` is no folder")
    steps = Checkpointer(root, read_only=True).steps()
    if steps and step <= steps[-1]:
        raise InputError(
            f"`{root}` has step {steps[-1]}, and steps only rise: {step} cannot be saved"
        )
    if os.path.lexists(place := os.path.join(root, str(step))):
        raise InputError(f"`{place}` is in the way, and no checkpoint")


def parse_step(text: str) -> int:
    """Reads `--step`.

    Raises:
      InputError: it is no number of a step.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise InputError(f"`--step` must be an integer from 0 on, found `{text:.40}`")
    return int(text)


def make_optimizer(target: str, *, allocate: bool) -> Any:
    """Calls `MODULE:FUNCTION`, which returns an optimizer.

    Args:
      target: module and function; the function takes no arguments.
      allocate: whether to run it; otherwise it is traced for its shapes.

    Raises:
      InputError: there is no such function, it raises, or it returns something else.
    """
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise InputError(f"expected MODULE:FUNCTION, found `{target}`")
    # As for `python -m`; an installed script would not find modules beside the caller.
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
        made = function() if allocate else _abstract(function)
    try:
        view_of(made, argument=target)
    except TypeError as error:
        raise InputError(str(error)) from None
    return made


def _abstract(function: Any) -> Any:
    made: list[Any] = []

    def run() -> Any:
        made.append(function())
        return [leaf for leaf in jax.tree.leaves(made[0]) if not _is_abstract(leaf)]

    concrete = iter(jax.eval_shape(run))
    return jax.tree.map(lambda leaf: leaf if _is_abstract(leaf) else next(concrete), made[0])


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def parse_rule(text: str) -> Rule:
    r"""Reads `PATTERN=ACTION`.

    Actions: a word (`initialise`, `keep`, `drop`, `cast`, `reshape`), `rename:SOURCE`,
    `stack:SOURCE[:AXIS]`, `unstack:SOURCE:INDEX[:AXIS]` or `pad:AXIS:SIZE`. A `Map` needs Python.

    Raises:
      InputError: it is not of that form.

    Examples:
      >>> parse_rule(r'(.*)/layers/(.*)=stack:\1/layers_{i}/\2')
      ('(.*)/layers/(.*)', Stack(source='\\1/layers_{i}/\\2', axis=0))
      >>> parse_rule('.*/embedding=pad:0:32128')
      ('.*/embedding', Pad(axis=0, to=32128, value=0))
      >>> parse_rule('state/.*=drop')
      ('state/.*', 'drop')
    """
    pattern, equals, action = text.rpartition("=")
    word, *rest = action.split(":")
    if not (equals and pattern and word):
        raise InputError(f"`--rule` must be PATTERN=ACTION, found `{text:.200}`")
    match word, rest:
        case ("initialise" | "keep" | "drop" | "cast" | "reshape") as plain, []:
            return pattern, plain
        case "rename", [source]:
            return pattern, Rename(source)
        case "stack", [source]:
            return pattern, Stack(source)
        case "stack", [source, axis] if _is_integer(axis):
            return pattern, Stack(source, int(axis))
        case "unstack", [source, index] if _is_index(index):
            return pattern, Unstack(source, index)
        case "unstack", [source, index, axis] if _is_index(index) and _is_integer(axis):
            return pattern, Unstack(source, index, int(axis))
        case "pad", [axis, size] if _is_integer(axis) and _is_integer(size) and size[0] != "-":
            return pattern, Pad(int(axis), int(size))
    raise InputError(
        f"`--rule`: expected initialise, keep, drop, cast, reshape, rename:SOURCE, "
        f"stack:SOURCE[:AXIS], unstack:SOURCE:INDEX[:AXIS] or pad:AXIS:SIZE, found `{action:.200}`"
    )


def parse_writers(texts: Sequence[str]) -> str | dict[str, str] | None:
    """Reads `NAME`, or `GROUP=NAME` for every group.

    Raises:
      InputError: it is something else.

    Examples:
      >>> parse_writers(['Adam']), parse_writers(['kernels=LAMB', 'rest=Adam'])
      ('Adam', {'kernels': 'LAMB', 'rest': 'Adam'})
    """
    pairs = [text.rpartition("=") for text in texts]
    if len(pairs) == 1 and not pairs[0][1]:
        return pairs[0][2]
    if not all(group and name for group, _, name in pairs):
        raise InputError(
            f"`--written-by` must be a NAME, or GROUP=NAME for each; found `{' '.join(texts)}`"
        )
    return {group: name for group, _, name in pairs} or None


def _is_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isdecimal() and len(digits) <= _DIGITS


def _is_index(text: str) -> bool:
    """Whether it may be one: digits, or a group of the pattern that has them."""
    return not text.isdecimal() or len(text) <= _DIGITS


@contextlib.contextmanager
def only_wrong_input() -> Iterator[None]:
    """Whatever goes wrong is the input's fault: any error of optimizers is an `InputError`."""
    try:
        yield
    except OptimizerError as error:
        raise InputError(str(error)) from error


@contextlib.contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Runs code that is not ours: any exception is an `InputError` that begins with `what`."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise InputError(f"{what}: {type(error).__name__}: {text}") from error
