"""The folder of a run's checkpoints, as its one writer has it."""

from __future__ import annotations

import shutil
from pathlib import Path

from opt_optax_bridge.checkpoint._durable import sync, temporary_paths
from opt_optax_bridge.checkpoint._lock import WriterLock
from opt_optax_bridge.checkpoint.errors import CheckpointError, LockError, SaveError

TRASH = "trash"


class WriterRoot:
    """The folder in which a writer saves steps, and what is to be removed from it.

    In a run of many processes the first takes it; in the others nothing is ever to be done.

    Args:
      directory: the folder.

    Attributes:
      failed: steps that could not be saved; what they left goes with the next `clean`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.failed: set[int] = set()
        self._lock: WriterLock | None = None

    def take(self) -> CheckpointError | None:
        """Makes the folder and takes its lock; returns why it cannot."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            trash = self.directory / TRASH
            if trash.is_symlink() or (trash.exists() and not trash.is_dir()):
                return LockError(f"`{trash}`: expected a folder for deleted steps: move it away")
            self._lock = WriterLock(self.directory)
        except LockError as error:
            return error
        except OSError as error:
            return SaveError(f"`{self.directory}` cannot be made: {error.strerror}")
        self.clean()
        return None

    def clean(self) -> None:
        """Removes what was deleted by a rename, and what steps left that could not be saved."""
        if self._lock is None:
            return
        failed, self.failed = self.failed, set()
        for step in failed:
            for path in temporary_paths(self.directory / str(step)):
                shutil.rmtree(path, ignore_errors=True)
        trash = self.directory / TRASH
        if deleted := list(trash.iterdir()) if trash.is_dir() else []:
            sync(self.directory)  # The renames are on the disk before anything in them goes.
            for path in deleted:
                shutil.rmtree(path, ignore_errors=True)

    def release(self) -> None:
        """Gives the folder to the next writer; again is fine."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
