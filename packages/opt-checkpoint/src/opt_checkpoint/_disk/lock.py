"""One writer per folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from opt_checkpoint.errors import LockError

FILE_NAME = "writer.lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class WriterLock:
    """The right to write below a folder, held until `release` or the end of the process.

    The lock is the kernel's (`flock`), so a holder that is killed never blocks the next; the file
    says who it is. Where the file system has no such locks, the file itself is the lock: created
    exclusively, and taken over if its process is on this machine and gone.

    Args:
      folder: to be written below.

    Raises:
      LockError: another has it; says who.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._owned = False
        self._handle = self._open()
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=_Forget(weakref.ref(self)))

    def check(self) -> None:
        """Raises a `LockError` unless the lock is still held, on the file that has its name."""
        if self._handle is None:
            raise LockError(
                f"`{self._path.parent}`: the lock is that of the process that this one was forked "
                "from: save there"
            )
        try:
            same = os.path.samestat(os.lstat(self._path), os.fstat(self._handle))
        except OSError:
            same = False
        if not same:
            raise LockError(
                f"`{self._path}` was removed or replaced, so that another may write there now: "
                "open the folder anew"
            )

    def release(self) -> None:
        """Gives the folder back; again is fine."""
        if self._handle is None:
            return
        if self._owned:
            with suppress(LockError):
                self.check()
                self._path.unlink(missing_ok=True)
        else:
            # Stays there: if it were removed, two could hold a lock on files of one name.
            os.ftruncate(self._handle, 0)
        self.forget()

    def forget(self) -> None:
        """Lets go without a word in the file: what a fork holds, its parent still holds."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int | None:
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise LockError(
                f"`{self._path}` cannot be opened for writing: {error.strerror}"
            ) from error
        try:
            locked = _flock(handle)
        except BlockingIOError:
            holder = _describe(_read(handle))
            os.close(handle)
            raise LockError(
                f"`{self._path.parent}` has a writer already: {holder}. Wait for it or end it, or "
                "open the folder with `read_only=True`"
            ) from None
        if not locked:
            os.close(handle)
            return self._create()
        _write(handle)
        return handle

    def _create(self) -> int:
        """Without kernel locks: the one who creates the file beside it has the lock."""
        self._path = self._path.with_name(FILE_NAME + ".exclusive")
        self._owned = True
        for _ in range(2):
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                self._remove_stale()
            else:
                _write(handle)
                return handle
        raise LockError(
            f"`{self._path}` was taken by another writer at this moment: try again, or delete the "
            f"files `{self._path.name}*` if nobody is writing"
        )

    def _remove_stale(self) -> None:
        holder = _read_file(self._path)
        if holder is None:
            return
        if not _is_gone(holder):
            raise LockError(
                f"`{self._path.parent}` has a writer already: {_describe(holder)}. If it is gone, "
                f"delete `{self._path}`"
            )
        # Of those that find it stale, the one that makes this second name may remove the first;
        # what it then holds may already be the file of the next writer, so it looks again.
        grave = self._path.with_name(self._path.name + ".stale")
        try:
            os.link(self._path, grave)
        except (FileNotFoundError, FileExistsError):
            return
        try:
            if _read_file(grave) == holder:
                self._path.unlink()
        finally:
            grave.unlink()


class _Forget:
    """In a forked child, closes the lock: a child that outlives its parent must not hold it."""

    def __init__(self, lock: weakref.ref[WriterLock]) -> None:
        self._lock = lock

    def __call__(self) -> None:
        if (lock := self._lock()) is not None:
            lock.forget()


def _flock(handle: int) -> bool:
    """Locks an open file; returns whether there are such locks here."""
    fcntl = _fcntl()
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError from None
        raise
    return True


def _fcntl() -> ModuleType | None:
    try:
        import fcntl
    except ImportError:
        return None
    return fcntl


def _write(handle: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": _started(os.getpid()),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode(), 0)


def _read(handle: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _read_file(path: Path) -> dict[str, Any] | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return _read(handle)
    finally:
        os.close(handle)


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "one that has not said who it is"
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}"


def _is_gone(holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname() or type(holder.get("pid")) is not int:
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(holder["pid"]) != holder.get("started")


def _started(pid: int) -> str:
    """When a process started, in the kernel's clock; empty where it does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
