import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from opt_checkpoint._writer import WriterLock
from opt_checkpoint.errors import LockError

pytestmark = pytest.mark.internals


def no_locks(*_: object) -> None:
    """`flock` of a file system that has none."""
    raise OSError(errno.ENOTSUP, "Operation not supported")


@pytest.fixture(params=["kernel", "file"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's locks, and on a file system that has none."""
    if request.param == "file":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    return str(request.param)


def test_one_at_a_time(way: str, tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with pytest.raises(LockError, match=f"has a writer already: process {os.getpid()} on "):
        WriterLock(tmp_path)
    lock.release()
    lock.release()
    WriterLock(tmp_path).release()


HERE = os.uname().nodename


@pytest.mark.parametrize(
    ("holder", "is_taken_over"),
    [
        (f"{2**22 + 1}\n{HERE}\n", True),  # no such process
        (f"{os.getpid()}\n{HERE}\n1\n", True),  # one of its number that began at another time
        (f"{os.getpid()}\n{HERE}\n{(1 << 64) + 1}\n", True),  # in another life of the machine
        (f"1\nelsewhere\n{(1 << 64) + 1}\n", False),
    ],
    ids=["no process", "another process", "another boot", "another machine"],
)
def test_only_a_holder_that_is_surely_gone_is_replaced(
    holder: str, is_taken_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / "writer.lock.exclusive"
    path.write_text(holder)
    path.chmod(0o644)
    if is_taken_over:
        WriterLock(tmp_path).release()
        return
    with pytest.raises(LockError, match=f"process 1 on elsewhere, since .*rm {path}"):
        WriterLock(tmp_path)
    assert path.read_text() == holder


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "writer.lock").symlink_to(target)
    with pytest.raises(LockError, match="cannot be opened for writing"):
        WriterLock(folder)
    assert target.read_text() == "precious"


FORKS = """
import os, signal, sys, time
from pathlib import Path
from opt_checkpoint._writer import WriterLock

lock = WriterLock(Path(sys.argv[1]))
if child := os.fork():
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_forked_child_that_lives_on_does_not_block(tmp_path: Path) -> None:
    with (tmp_path / "child").open("w") as file:
        subprocess.run([sys.executable, "-c", FORKS, tmp_path], stdout=file, check=False)
    child = int((tmp_path / "child").read_text())
    try:
        os.kill(child, 0)
        WriterLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
