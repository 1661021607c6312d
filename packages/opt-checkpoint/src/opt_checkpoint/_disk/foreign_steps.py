"""Steps in a folder that another program wrote: never to be taken for no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from opt_checkpoint._disk.orbax import LEAVES, MANIFEST
from opt_checkpoint.errors import ForeignError

# Orbax's marks of a checkpoint, and of an item of one.
CHECKPOINT_MARK, ITEM_MARK = "_CHECKPOINT_METADATA", "_METADATA"
_MSGPACK = "checkpoint"  # T5X, and Orbax before 0.5
_STEP = re.compile(r"(?:.*[_.-])?\d+", re.DOTALL)
_LISTED = 5


def check_own(root: Path) -> None:
    """Checks that all steps in a folder are this package's.

    Raises:
      ForeignError: another program's are there; says how to read them.
    """
    if found := foreign_steps(root):
        raise ForeignError(describe(root, found))


def foreign_steps(root: Path) -> list[str]:
    """Returns the names of steps that another program wrote; `.` if the folder itself is one."""
    if not root.is_dir():
        return []
    if is_foreign(root):
        return ["."]
    return sorted(path.name for path in root.iterdir() if _is_foreign(path))


def is_orbax(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Orbax, or an item of one."""
    return (folder / CHECKPOINT_MARK).is_file() or (folder / ITEM_MARK).is_file()


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a checkpoint of Orbax, or an item of one, that has none of our items."""
    return is_orbax(folder) and not _is_own(folder)


def describe(root: Path, found: Sequence[str]) -> str:
    """Returns what is to be said of foreign steps."""
    shown = ", ".join(f"`{name:.80}`" for name in found[:_LISTED])
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    one = root if found[0] == "." else root / found[0]
    opened = f"open_foreign({str(one)!r}, written_by=...)"
    return (
        f"`{root}` has checkpoints that opt-checkpoint did not write: {shown}{more}. It is not "
        f"empty, and nothing in it is touched. Restore one by `plan_restore({opened}, target)"
        ".apply()`, or a msgpack file by `restore_legacy`, and save into another folder"
    )


def _is_own(folder: Path) -> bool:
    return (folder / MANIFEST).is_dir() or (folder / LEAVES).is_dir()


def _is_foreign(path: Path) -> bool:
    """Whether it is named like a step, has another program's marks, and none of our items."""
    name = path.name
    if path.is_symlink() or not _STEP.fullmatch(name) or "orbax-checkpoint-tmp" in name:
        return False
    if path.is_file():
        return name.startswith("checkpoint_")  # Flax's msgpack
    if not path.is_dir() or _is_own(path):
        return False
    if is_orbax(path) or (path / _MSGPACK).is_file():
        return True
    return any((item / ITEM_MARK).is_file() for item in path.iterdir())
