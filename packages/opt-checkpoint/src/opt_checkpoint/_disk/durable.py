"""A commit that outlives a power cut: everything is on the disk before the rename, and it after."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

from orbax.checkpoint.path import atomicity, atomicity_types

_TEMPORARY = atomicity_types.TMP_DIR_SUFFIX
_SEALED = "-sealed"


class DurablePath(atomicity_types.TemporaryPath):
    """Orbax's atomic rename, with the `fsync`s that it leaves out.

    Orbax and TensorStore sync the arrays, but neither the metadata files nor the directories, and
    not the parent after the rename. Here Orbax renames the step to a name that is still temporary;
    then every file and directory under it is synced, it is renamed to its own name, and the parent
    is synced.
    """

    def __init__(self, temporary: Any, final: Any, **options: Any) -> None:
        self._final = final
        # What lies in a step that is still temporary is synced with it.
        self._sealed = (
            None
            if _TEMPORARY in final.parent.name
            else temporary.parent / f"{temporary.name}-sealed"
        )
        self._inner = atomicity.AtomicRenameTemporaryPath(
            temporary, self._sealed or final, **options
        )

    @classmethod
    async def validate(cls, temporary_path: Any) -> None:
        """Raises `ValidationError` unless the path is a temporary one."""
        await atomicity.AtomicRenameTemporaryPath.validate(temporary_path)

    @classmethod
    async def validate_final(cls, final_path: Any) -> None:
        """Raises `ValidationError` unless the path is a final one."""
        await atomicity.AtomicRenameTemporaryPath.validate_final(final_path)

    @classmethod
    def from_temporary(cls, temporary_path: Any, **options: Any) -> DurablePath:
        """Returns the path of a step that is being written."""
        final = temporary_path.parent / temporary_path.name.partition(_TEMPORARY)[0]
        return cls(temporary_path, final, **options)

    @classmethod
    def from_final(cls, final_path: Any, **options: Any) -> DurablePath:
        """Returns the path under which a step is to be written."""
        return cls(final_path.parent / (final_path.name + _TEMPORARY), final_path, **options)

    def get(self) -> Any:
        """Returns the temporary path."""
        return self._inner.get()

    def get_final(self) -> Any:
        """Returns the final path."""
        return self._final

    async def create(self) -> Any:
        """Creates the temporary directory."""
        if self._sealed is not None:
            await asyncio.to_thread(shutil.rmtree, self._sealed, ignore_errors=True)
        return await self._inner.create()

    async def finalize(self) -> None:
        """Moves the step to its final name, durably; replaces nothing."""
        await self._inner.finalize()  # type: ignore[no-untyped-call]
        if self._sealed is not None:
            await asyncio.to_thread(_commit, Path(self._sealed), Path(self._final))


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
    """Returns the names under which a step lies before it has its own."""
    return [final.with_name(final.name + _TEMPORARY + suffix) for suffix in ("", _SEALED)]
