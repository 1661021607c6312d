"""One writer per folder."""

from __future__ import annotations

import errno
import os
import shlex
import time
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from opt_checkpoint.errors import LockError

FILE_NAME = "writer.lock"
# from file systems without `flock`, such as Lustre mounted without it
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class WriterLock:
    """The right to write below a folder, held until `release` or the end of the process.

    The lock is the kernel's, so a killed holder never blocks the next one; the file says who it is.
    On file systems without such locks, the existence of a second file is the lock. It is taken over
    if its process ran on this machine and has ended, as its start time and the boot id tell.

    A `LockError` says which other process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._process = os.getpid()
        path = folder / FILE_NAME
        try:
            self._lock = _acquired(FileLock(path, on_acquired=_sign, thread_local=False))
        except _NoLocksError:
            path = path.with_name(f"{FILE_NAME}.exclusive")
            self._lock = _acquired(SoftFileLock(path, thread_local=False))
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


class _NoLocksError(Exception):
    """The file system has no locks."""


def _acquired(lock: BaseFileLock) -> BaseFileLock:
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
            raise _NoLocksError from error
        raise LockError(f"`{path}` cannot be opened for writing: {error.strerror}") from error
    return lock


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
