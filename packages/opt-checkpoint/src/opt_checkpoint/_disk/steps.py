"""The steps of a folder: this package's, and those that another program wrote."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from opt_checkpoint._disk.manifest import FILE_NAME, ITEM_MARK, has_item
from opt_checkpoint._disk.processes import are_equal, sync_errors
from opt_checkpoint.errors import DamagedError, ForeignError, LoadError, MissingError, SaveError

CHECKPOINT_MARK = "_CHECKPOINT_METADATA"  # of Orbax
INDEX = "checkpoint"  # of T5X's own layout, and of Orbax 0.1
_STEP = re.compile(r"(?:.*[_.-])?\d+", re.DOTALL)
_LISTED = 5
_log = logging.getLogger(__name__)
_Used = TypeVar("_Used")


def list_steps(root: Path) -> list[int]:
    """Returns the steps in a folder, the oldest first; follows no link."""
    if not root.is_dir():
        return []
    steps = (_step(path) for path in root.iterdir())
    return sorted(step for step in steps if step is not None)


def _step(path: Path) -> int | None:
    name = path.name
    if not (name.isascii() and name.isdecimal() and str(int(name)) == name):
        return None
    if path.is_symlink() or not has_item(path):
        return None
    return int(name)


def list_own(directory: Path) -> list[int]:
    """Returns the steps, the oldest first; a `ForeignError` if another program wrote some."""
    check_own(directory)
    return list_steps(directory)


def check_new(directory: Path, step: int) -> None:
    """Raises a `SaveError` unless a step of this number can be saved in a folder."""
    latest = max(list_own(directory), default=-1)
    if step <= latest:
        raise SaveError(
            f"step {step} is not saved: `{directory}` has step {latest}. Steps only rise; after a "
            "fall back to an earlier step, call `discard_after` first"
        )
    if os.path.lexists(path := directory / str(step)):
        raise SaveError(f"step {step} is not saved: `{path}` exists and is not a checkpoint")


def check_equal(directory: Path, steps: Sequence[object]) -> None:
    """Raises a `DamagedError` unless all processes see the same steps."""
    if not are_equal(repr(steps).encode()):
        raise DamagedError(f"`{directory}`: the processes do not see the same steps")


def newest(
    directory: Path, use: Callable[[int], _Used], pass_over: Callable[[int], None]
) -> _Used | None:
    """Returns what `use` returns for the newest step, `None` without steps; all processes call it.

    Where `use` raises a `DamagedError` or a `LoadError` in every process, `pass_over` is called and
    the step before is tried. A `MissingError` says that no step is good.
    """
    passed: set[int] = set()
    while True:
        steps = list_own(directory)
        check_equal(directory, steps)
        left = [step for step in steps if step not in passed]
        if not left:
            break
        try:
            return use(left[-1])
        except MissingError:
            # A writer may have deleted the step meanwhile, and saved others.
            with sync_errors():
                if left[-1] in list_own(directory):
                    raise
        except (DamagedError, LoadError) as error:
            passed.add(left[-1])
            pass_over(left[-1])
            _log.warning("step %d is passed over: %s", left[-1], error)
    if steps:
        raise MissingError(f"`{directory}`: none of the steps {steps} is valid")
    return None


def check_own(root: Path) -> None:
    """Raises a `ForeignError`, which says how to read them, if another program wrote steps."""
    if names := foreign_steps(root):
        raise ForeignError(describe(root, names))


def foreign_steps(root: Path) -> list[str]:
    """Returns the names of steps that another program wrote; `.` if the folder itself is a step."""
    if not root.is_dir():
        return []
    if is_orbax(root) and not has_item(root):
        return ["."]
    return sorted(path.name for path in root.iterdir() if _is_foreign(path))


def item_with_manifest(folder: Path) -> Path | None:
    """Returns the folder of the manifest: this folder, or its only item that has a manifest.

    A `ForeignError` names the items if several have a manifest.
    """
    if has_item(folder) or _is_item(folder):
        return folder
    items = sorted(path for path in folder.iterdir() if _is_item(path))
    if len(items) > 1:
        names = ", ".join(f"`{path.name}`" for path in items)
        raise ForeignError(f"`{folder}` holds several optimizers: give the folder of {names}")
    return items[0] if items else None


def is_orbax(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Orbax, or an item of one."""
    return (folder / CHECKPOINT_MARK).is_file() or (folder / ITEM_MARK).is_file()


def describe(root: Path, names: Sequence[str]) -> str:
    """Returns the message of a `ForeignError` about foreign steps."""
    step, what = root, "is a checkpoint that no `Checkpointer` wrote"
    if names[0] != ".":
        shown = ", ".join(f"`{name:.80}`" for name in names[:_LISTED])
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        step, what = root / names[0], f"has checkpoints that no `Checkpointer` wrote: {shown}{more}"
    who = "" if step.is_dir() and item_with_manifest(step) else ", written_by=..."
    return (
        f"`{root}` {what}. It is not empty, and nothing in it is touched. Restore one by "
        f"`plan_restore(open_foreign({str(step)!r}{who}), target).apply()`, or a msgpack file by "
        "`restore_legacy`, and save into another folder"
    )


def _is_item(folder: Path) -> bool:
    """Whether `OptimizerHandler` wrote it: its manifest is next to Orbax's description."""
    return (folder / FILE_NAME).is_file() and (folder / ITEM_MARK).is_file()


def _is_foreign(path: Path) -> bool:
    """Whether it has the name of a step, another program's marks, and no item of ours."""
    name = path.name
    if path.is_symlink() or not _STEP.fullmatch(name) or "orbax-checkpoint-tmp" in name:
        return False
    if path.is_file():
        return name.startswith("checkpoint_")  # Flax's msgpack
    if not path.is_dir() or has_item(path):
        return False
    if is_orbax(path) or (path / INDEX).is_file():
        return True
    return any((item / ITEM_MARK).is_file() for item in path.iterdir())
