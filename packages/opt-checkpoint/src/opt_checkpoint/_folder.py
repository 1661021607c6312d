"""What a folder holds: steps of a `Checkpointer`, the item of one, or another program's steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from opt_checkpoint.errors import ForeignError

MANIFEST = "manifest.json"
ITEM = "leaves"  # Orbax's item of a step: the arrays, with the manifest next to them
ITEM_MARK = "_METADATA"  # Orbax's mark of a tree
CHECKPOINT_MARK = "_CHECKPOINT_METADATA"  # of Orbax
INDEX = "checkpoint"  # of T5X's own layout, and of Orbax 0.1
_STEP = re.compile(r"(?:.*[_.-])?\d+", re.DOTALL)
_LISTED = 5


def has_item(folder: Path) -> bool:
    """Whether a folder is a step of a `Checkpointer`; a tree of Orbax may have that name in it."""
    return (folder / ITEM).is_dir() and not (folder / ITEM_MARK).is_file()


def item_folder(folder: Path) -> Path:
    """Returns where the manifest and the arrays are: in a step of a `Checkpointer`, or here."""
    return folder / ITEM if has_item(folder) else folder


def list_steps(root: Path) -> list[int]:
    """Returns the steps of a `Checkpointer` in a folder, the oldest first; follows no link."""
    if not root.is_dir():
        return []
    steps = (_step(path) for path in root.iterdir())
    return sorted(step for step in steps if step is not None)


def _step(path: Path) -> int | None:
    name = path.name
    if not (name.isascii() and name.isdecimal() and str(int(name)) == name):
        return None
    return int(name) if has_item(path) and not path.is_symlink() else None


def list_checked(root: Path) -> list[int]:
    """Returns `list_steps`; a `ForeignError` says how to read those of another program."""
    if names := foreign_steps(root):
        raise ForeignError(describe_foreign(root, names))
    return list_steps(root)


def foreign_steps(root: Path) -> list[str]:
    """Returns the names of steps that another program wrote; `.` if the folder itself is a step."""
    if not root.is_dir():
        return []
    if is_orbax(root) and not has_item(root):
        return ["."]
    return sorted(path.name for path in root.iterdir() if _is_foreign(path))


def item_with_manifest(folder: Path) -> Path | None:
    """Returns the folder of the manifest: this folder, or its only item that has a manifest."""
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


def describe_foreign(root: Path, names: Sequence[str]) -> str:
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
    return (folder / MANIFEST).is_file() and (folder / ITEM_MARK).is_file()


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
