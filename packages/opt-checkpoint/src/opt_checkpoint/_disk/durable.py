"""A commit that survives a power failure: all files are synced before the rename, it after."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity, atomicity_types

_TEMPORARY = atomicity_types.TMP_DIR_SUFFIX
_SEALED = "-sealed"


class DurablePath(atomicity.AtomicRenameTemporaryPath):
    """Orbax's atomic rename, with the `fsync`s that it omits.

    Orbax and TensorStore sync the arrays, but neither the metadata files nor the directories, and
    not the parent after the rename. Here Orbax renames the step to another temporary name; then
    every file and directory under it is synced, it gets its final name, and the parent is synced.
    """

    def __init__(self, temporary_path: Any, final_path: Any, **options: Any) -> None:
        self._own_name = final_path
        # Items of a temporary step are synced with it.
        self._is_step = _TEMPORARY not in final_path.parent.name
        if self._is_step:
            final_path = temporary_path.with_name(temporary_path.name + _SEALED)
        super().__init__(temporary_path, final_path, **options)

    def get_final(self) -> Any:
        """Returns the final path."""
        return self._own_name

    async def create(self) -> Any:
        """Creates the temporary directory while training waits.

        Orbax passes each call to another thread, which takes longer than the call.
        """
        if self._is_step:
            shutil.rmtree(self._final_path, ignore_errors=True)
            return await super().create()
        Path(self.get()).mkdir()
        return self.get()

    async def finalize(self) -> None:
        """Gives the step its final name, durably; replaces nothing."""
        await super().finalize()  # type: ignore[no-untyped-call]
        if self._is_step:
            await asyncio.to_thread(_commit, Path(self._final_path), Path(self._own_name))


def _commit(sealed: Path, final: Path) -> None:
    sync_tree(sealed)
    sealed.rename(final)
    sync(final.parent)


def sync_tree(folder: Path) -> None:
    """Writes every file and directory under a folder to the disk, and the folder last."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Writes a file or a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def temporary_paths(final: Path) -> list[Path]:
    """Returns the temporary names of a step."""
    return [final.with_name(final.name + _TEMPORARY + suffix) for suffix in ("", _SEALED)]
