"""Steps in a folder that another program wrote: never to be taken for no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from opt_checkpoint._disk.manifest import FILE_NAME
from opt_checkpoint._disk.orbax import LEAVES, MANIFEST
from opt_checkpoint.errors import ForeignError

# Orbax's marks of a checkpoint, and of an item of one.
CHECKPOINT_MARK, ITEM_MARK = "_CHECKPOINT_METADATA", "_METADATA"
INDEX = "checkpoint"  # of T5X's own layout, and of Orbax 0.1
_STEP = re.compile(r"(?:.*[_.-])?\d+", re.DOTALL)
_LISTED = 5


def check_own(root: Path) -> None:
    """Raises a `ForeignError` if another program's steps are there; it says how to read them."""
    if found := foreign_steps(root):
        raise ForeignError(describe(root, found))


def foreign_steps(root: Path) -> list[str]:
    """Returns the names of steps that another program wrote; `.` if the folder itself is one."""
    if not root.is_dir():
        return []
    if is_orbax(root) and not _is_own(root):
        return ["."]
    return sorted(path.name for path in root.iterdir() if _is_foreign(path))


def own_item(folder: Path) -> Path | None:
    """Returns what has the manifest: the step or item given, or an item of it; `None` if nothing.

    A `ForeignError` names the items, where several have one.
    """
    if _is_own(folder) or _is_item(folder):
        return folder
    items = sorted(path for path in folder.iterdir() if _is_item(path))
    if len(items) > 1:
        names = ", ".join(f"`{path.name}`" for path in items)
        raise ForeignError(f"`{folder}` holds several optimizers: give the folder of {names}")
    return items[0] if items else None


def is_orbax(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Orbax, or an item of one."""
    return (folder / CHECKPOINT_MARK).is_file() or (folder / ITEM_MARK).is_file()


def describe(root: Path, found: Sequence[str]) -> str:
    """Returns what is to be said of foreign steps."""
    one, what = root, "is a checkpoint that no `Checkpointer` wrote"
    if found[0] != ".":
        shown = ", ".join(f"`{name:.80}`" for name in found[:_LISTED])
        more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
        one, what = root / found[0], f"has checkpoints that no `Checkpointer` wrote: {shown}{more}"
    who = "" if one.is_dir() and own_item(one) else ", written_by=..."
    return (
        f"`{root}` {what}. It is not empty, and nothing in it is touched. Restore one by "
        f"`plan_restore(open_foreign({str(one)!r}{who}), target).apply()`, or a msgpack file by "
        "`restore_legacy`, and save into another folder"
    )


def _is_own(folder: Path) -> bool:
    return (folder / MANIFEST).is_dir() or (folder / LEAVES).is_dir()


def _is_item(folder: Path) -> bool:
    """Whether `OptimizerHandler` wrote it: its manifest lies beside Orbax's description."""
    return (folder / FILE_NAME).is_file() and (folder / ITEM_MARK).is_file()


def _is_foreign(path: Path) -> bool:
    """Whether it is named like a step, has another program's marks, and none of our items."""
    name = path.name
    if path.is_symlink() or not _STEP.fullmatch(name) or "orbax-checkpoint-tmp" in name:
        return False
    if path.is_file():
        return name.startswith("checkpoint_")  # Flax's msgpack
    if not path.is_dir() or _is_own(path):
        return False
    if is_orbax(path) or (path / INDEX).is_file():
        return True
    return any((item / ITEM_MARK).is_file() for item in path.iterdir())
