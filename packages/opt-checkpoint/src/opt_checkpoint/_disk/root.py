"""The folder of a run's checkpoints, as its one writer has it."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from opt_checkpoint._disk.durable import sync, temporary_paths
from opt_checkpoint._disk.lock import WriterLock
from opt_checkpoint.errors import CheckpointError, LockError, SaveError

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

    def check(self) -> None:
        """Raises a `LockError` if the folder is no longer this writer's."""
        if self._lock is not None:
            self._lock.check()

    def clean(self) -> None:
        """Removes what was deleted by a rename, and what steps left that could not be saved."""
        if self._lock is None:
            return
        try:
            self._lock.check()
        except LockError:
            return  # It may be another's now.
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


class HasLock(Protocol):
    """What threads use one at a time."""

    _alone: Any


_Owner = TypeVar("_Owner", bound=HasLock)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def one_at_a_time(
    method: Callable[Concatenate[_Owner, _Given], _Result],
) -> Callable[Concatenate[_Owner, _Given], _Result]:
    """Lets one thread at a time call the methods of an object; such a method may call others."""

    @functools.wraps(method)
    def call(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with self._alone:
            return method(self, *args, **kwargs)

    return call


def check_options(
    directory: str | Path, max_to_keep: int | None, keep_period: int | None, interval: int
) -> None:
    """Raises a `ValueError` if an option of a writer is none."""
    if "://" in str(directory):
        raise ValueError(
            f"`directory`: expected a path of the file system, found `{directory}`: mount the "
            "bucket"
        )
    given = {
        "max_to_keep": max_to_keep,
        "keep_period": keep_period,
        "save_interval_steps": interval,
    }
    for name, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"`{name}`: expected an integer from 1 on, found {value!r}")
