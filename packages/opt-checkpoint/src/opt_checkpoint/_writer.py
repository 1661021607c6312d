"""The one writer of a folder of checkpoints."""

from __future__ import annotations

import atexit
import contextvars
import errno
import logging
import operator
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from opt_core.errors import OptimizerError
from orbax.checkpoint.path import atomicity_types
from orbax.checkpoint.path import step as step_lib

from opt_checkpoint._handler import (
    OptimizerHandler,
    OptimizerSave,
    Origin,
    Saving,
    check_path,
)
from opt_checkpoint._manifest import ITEM, list_checked, list_steps
from opt_checkpoint._processes import is_first, sync_errors
from opt_checkpoint.errors import LockError, MissingError, SaveError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_TRASH = "trash"
_LOCK = "writer.lock"
# from file systems without `flock`, such as Lustre mounted without it
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class Writer:
    """Saves and deletes the steps of a folder; every process of a run has one.

    The first process holds the lock, syncs files and removes leftovers. Orbax is called in a thread
    of its own: if Ctrl-C, which Python raises in the main thread, interrupted Orbax in a save, it
    would lose track of the threads of the save. So Ctrl-C ends the waiting for a call, not the
    call; the next one runs after it.

    Attributes:
      passed: the damaged steps that a restore has skipped.
      is_closed: whether `close` has finished.
    """

    def __init__(self, directory: Path, *, async_save: bool, **options: Any) -> None:
        self.passed: set[int] = set()
        self.is_closed = False
        self._directory = directory
        self._is_async = async_save
        self._process = os.getpid()
        self._lock: WriterLock | None = None
        self._saving: int | None = None
        self._failed: set[str] = set()  # steps that may have left a temporary folder
        self._is_stale = False
        self._origin: Origin | None = None
        with sync_errors():
            if is_first():
                self._take()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpointer")
        try:
            self._pool.submit(int).result()  # the thread exists before anything is interrupted
            with self._failing(f"`{directory}` cannot be written"):
                self._manager = _open_manager(directory, self._sync_saving, **options)
        except BaseException:
            self._pool.shutdown()
            self._release()
            raise
        atexit.register(self._log_unsaved)

    def save(self, step: int, target: Any, extras: Any, metadata: Any) -> None:
        """Saves a step; see `Checkpointer.save`."""
        self.wait()
        if not isinstance(step, bool):
            with suppress(TypeError):  # then `_check` says what is wrong
                step = operator.index(step)
        with sync_errors():
            self._check(step)
            saving = Saving.prepare(step, target, extras, metadata, self._origin)
        saving.check_equal(f"step {step} is not saved")
        if self._failed:
            self._clean()
        args = ocp.args.Composite(**{ITEM: OptimizerSave(saving)})
        self._saving = step
        where = f"step {step} in `{self._directory}`"
        with self._failing(f"{where}: not saved", step):
            if self._is_stale:
                # After a failed save, Orbax no longer knows which step to delete.
                self._call(self._manager.reload)
                self._is_stale = False
            # Orbax's own policy would skip steps; callers ask `should_save`.
            save = partial(self._manager.save, step, args=args, force=True)
            is_saved = self._call(save)
        if not is_saved:
            raise SaveError(f"{where}: not saved: Orbax left it out")
        self._origin = saving.origin
        self._pool.submit(self._clean)
        if not self._is_async:
            self.wait()

    def reached_preemption(self, step: int) -> bool:
        """Whether this process is about to be preempted."""
        return self._manager.reached_preemption(step)

    def wait(self) -> None:
        """Waits until the step being saved is on the disk; a failure is raised once."""
        if self._is_forked:
            return
        step = self._saving
        where = f"`{self._directory}`" if step is None else f"step {step} in `{self._directory}`"
        with self._failing(f"{where}: not saved", step):
            self._call(self._manager.wait_until_finished)
            if step is not None and is_first() and self._has(step):
                sync_entries(self._directory / str(step))  # Orbax's marks, made at the commit
                sync(self._directory)
        self._saving = None
        if step is not None and jax.process_count() == 1 and not self._has(step):
            self._failed.add(str(step))
            raise SaveError(f"{where} is not there: was it removed?")

    def close(self) -> None:
        """Waits, empties the trash, releases the folder; if interrupted, another call does."""
        try:
            self.wait()
        finally:
            with suppress(Exception):  # it would repeat what was just raised
                self._call(self._manager.close)
            self._log_unsaved()  # if Ctrl-C has interrupted the waiting
            self._clean()
            self._release()
            if not self._is_forked:
                self._pool.shutdown()
            atexit.unregister(self._log_unsaved)
            self.is_closed = True

    def delete(self, step: int) -> None:
        """Deletes a step; see `Checkpointer.delete`."""
        self.wait()
        with sync_errors():
            if step not in (steps := list_checked(self._directory)):
                raise MissingError(f"`{self._directory}` has no step {step}; it has {steps}")
        with self._failing(f"step {step} in `{self._directory}`: not deleted"):
            self._call(self._manager.reload)
            self._call(partial(self._manager.delete, step))
        self.passed.discard(step)
        self._clean()

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _call(self, act: Callable[[], _T]) -> _T:
        """Returns what a call returns that runs in the thread of this writer, to its end."""
        if self._is_forked:
            raise LockError("this process was forked from the one that saves: save there")
        return self._pool.submit(contextvars.copy_context().run, act).result()

    def _check(self, step: int) -> None:
        """Raises an error unless a step of this number can be saved here."""
        if self._lock is not None:
            self._lock.check()
        if type(step) is not int or step < 0:
            raise SaveError(f"`step`: expected a non-negative integer, found {step!r:.80}")
        steps = list_checked(self._directory)
        if steps and step <= steps[-1]:
            raise SaveError(
                f"step {step} is not saved: `{self._directory}` has step {steps[-1]}. Steps only "
                "rise; after a fall back to an earlier step, call `discard_after` first"
            )
        if os.path.lexists(path := self._directory / str(step)):
            raise SaveError(f"step {step} is not saved: `{path}` exists and is not a checkpoint")
        if passed := sorted(self.passed.intersection(steps)):
            raise SaveError(
                f"step {step} is not saved: `latest_valid` has passed over {passed}, which would "
                f"be kept in place of good ones: call `discard_after({passed[0] - 1})` first"
            )

    def _has(self, step: int) -> bool:
        return step in list_steps(self._directory)

    @contextmanager
    def _failing(self, what: str, step: int | None = None) -> Iterator[None]:
        """Makes errors of Orbax typed, and says whether the step being saved exists."""
        try:
            yield
        except OptimizerError:
            raise
        except Exception as error:
            self._saving, self._is_stale = None, True
            if step is not None and self._has(step):
                what = f"step {step} in `{self._directory}` is saved; what follows failed"
            elif step is not None:
                self._failed.add(str(step))
            text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            raise SaveError(f"{what}: {text}") from error

    def _take(self) -> None:
        """Creates the folder and takes its lock."""
        check_path(self._directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            trash = self._directory / _TRASH
            if trash.is_symlink() or (trash.exists() and not trash.is_dir()):
                raise LockError(f"`{trash}`: expected a folder for deleted steps: move it away")
            self._lock = WriterLock(self._directory)
        except LockError:
            raise
        except OSError as error:
            raise SaveError(f"`{self._directory}` cannot be made: {error.strerror}") from error
        # Folders of other names, and what appears later, may be another program's save in flight.
        names = (path.name for path in self._directory.glob(f"*{atomicity_types.TMP_DIR_SUFFIX}*"))
        steps = (name.partition(atomicity_types.TMP_DIR_SUFFIX)[0] for name in names)
        self._failed = {step for step in steps if step.isdecimal()}
        self._clean()

    def _clean(self) -> None:
        """Removes deleted steps from the trash, and what failed and killed saves have left."""
        if self._lock is None:
            return
        try:
            self._lock.check()
        except LockError:
            return  # another process may hold it now
        failed, self._failed = self._failed, set()
        for step in failed:
            for path in self._directory.glob(f"{step}{atomicity_types.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(path, ignore_errors=True)
        trash = self._directory / _TRASH
        if deleted := list(trash.iterdir()) if trash.is_dir() else []:
            sync(self._directory)  # the renames are on the disk before anything is deleted
            for path in deleted:
                shutil.rmtree(path, ignore_errors=True)

    def _sync_saving(self) -> None:
        """Syncs the step that is being saved; Orbax calls it before the rename to its name."""
        # Orbax and TensorStore sync the arrays, but neither the metadata files nor the directories.
        if self._saving is not None:
            # before it gets its name
            folder = self._directory / f"{self._saving}{atomicity_types.TMP_DIR_SUFFIX}"
            folder = folder if folder.is_dir() else self._directory / str(self._saving)
            for parent, _, _ in os.walk(folder, topdown=False):
                sync_entries(Path(parent))

    def _log_unsaved(self) -> None:
        step = self._saving
        if step is not None and is_first() and not self._is_forked and not self._has(step):
            _log.error(
                "step %d in `%s`: not saved: `wait` or `close` before the program ends",
                *(step, self._directory),
            )

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class _StepNames(step_lib.NameFormat[step_lib.Metadata]):
    """Steps are the folders named by a number that hold the item."""

    def build_name(self, step: int) -> str:
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[step_lib.Metadata]:
        for step in list_steps(Path(base_path)):
            yield step_lib.Metadata(step=step, path=base_path / str(step))

    def find_step(self, base_path: Any, step: int) -> step_lib.Metadata:
        if step not in list_steps(Path(base_path)):
            raise ValueError(f"no step {step} in `{base_path}`")  # as Orbax expects
        return step_lib.Metadata(step=step, path=base_path / str(step))


def _open_manager(
    directory: Path, before_commit: Callable[[], None], **policy: Any
) -> ocp.CheckpointManager:
    """Orbax's manager of a folder; `policy` says which steps it keeps."""
    options = ocp.CheckpointManagerOptions(
        **policy,
        async_options=ocp.options.AsyncOptions(
            # Threads that wait for a folder that cannot be created keep the process alive.
            create_directories_asynchronously=False,
            # It is called after the handlers' `finalize`, and before the rename (Orbax 0.12).
            post_finalization_callback=before_commit,
        ),
        step_name_format=_StepNames(),
        todelete_subdir=_TRASH,
    )
    handlers = {ITEM: OptimizerHandler()}
    return ocp.CheckpointManager(directory, item_handlers=handlers, options=options)


def sync_entries(folder: Path) -> None:
    """Writes the files in a folder to the disk, and the folder after them."""
    for path in folder.iterdir():
        if path.is_file():
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Writes a file or a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class WriterLock:
    """The right to write below a folder, held until `release` or the end of the process.

    The lock is the kernel's, so a killed holder never blocks the next one; the file says who it is.
    On file systems without such locks, the existence of a second file is the lock. It is taken over
    if its process ran on this machine and has ended, as its start time and the boot id tell.
    """

    def __init__(self, folder: Path) -> None:
        self._process = os.getpid()
        path = folder / _LOCK
        self._lock: BaseFileLock = FileLock(path, on_acquired=_sign, thread_local=False)
        if not _acquire(self._lock):
            path = path.with_name(f"{_LOCK}.exclusive")
            self._lock = SoftFileLock(path, thread_local=False)
            _acquire(self._lock)
        self._path = path
        self._file = path.lstat()

    def check(self) -> None:
        """Raises a `LockError` unless the lock is still held, on the file of its name."""
        if os.getpid() != self._process:
            raise LockError(
                f"`{self._path.parent}`: the lock is that of the process that this one was forked "
                "from: save there"
            )
        with suppress(OSError):
            if os.path.samestat(self._path.lstat(), self._file):
                return
        raise LockError(
            f"`{self._path}` was removed or replaced, so that another may write there now: open "
            "the folder again"
        )

    def release(self) -> None:
        """Releases the folder; may be repeated, and does nothing in a forked process."""
        if self._lock.is_locked and isinstance(self._lock, FileLock):
            with suppress(LockError):
                self.check()
                os.truncate(self._path, 0)  # the file stays, but has no holder
        self._lock.release()


def _acquire(lock: BaseFileLock) -> bool:
    """Takes a lock, or raises a `LockError`; false if the file system has no such locks."""
    path = Path(lock.lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        hint = "Wait for it or end it, or open the folder with `read_only=True`"
        if isinstance(lock, SoftFileLock):
            hint = f"If it is gone: rm {shlex.quote(str(path))}"
        raise LockError(f"`{path.parent}` has a writer already: {_holder(path)}. {hint}") from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise LockError(f"`{path}` cannot be opened for writing: {error.strerror}") from error
    return True


def _sign(handle: int) -> None:
    """Writes who has the lock, as `SoftFileLock` does."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n{os.uname().nodename}\n".encode(), 0)


def _holder(path: Path) -> str:
    try:
        process, host, *_ = path.read_text(errors="replace").splitlines()
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))
    except (OSError, ValueError):
        return "an unknown process"
    return f"process {process} on {host.partition('?')[0]}, since {since}"
