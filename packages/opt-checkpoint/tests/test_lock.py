import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from opt_checkpoint._disk import lock as _lock
from opt_checkpoint._disk.lock import WriterLock
from opt_checkpoint.errors import LockError


@pytest.fixture(params=["kernel", "file"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's locks, and on a file system that has none."""
    if request.param == "file":
        monkeypatch.setattr(_lock, "_fcntl", lambda: None)
    return str(request.param)


def test_one_at_a_time(way: str, tmp_path: Path) -> None:
    lock = WriterLock(tmp_path)
    with pytest.raises(LockError, match=f"has a writer already: process {os.getpid()} on "):
        WriterLock(tmp_path)
    lock.release()
    lock.release()
    WriterLock(tmp_path).release()


def test_a_process_that_is_gone_does_not_block(way: str, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from opt_checkpoint._disk import lock as _lock\n"
        f"if {way == 'file'}: _lock._fcntl = lambda: None\n"
        "lock = _lock.WriterLock(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert [path.name for path in tmp_path.iterdir()]
    WriterLock(tmp_path).release()


def test_a_holder_elsewhere_is_not_presumed_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lock, "_fcntl", lambda: None)
    holder = {"pid": 1, "host": "elsewhere", "started": "1", "since": "yesterday"}
    path = tmp_path / "writer.lock.exclusive"
    path.write_text(json.dumps(holder))
    with pytest.raises(LockError, match=r"process 1 on elsewhere, since yesterday.*If it is gone"):
        WriterLock(tmp_path)
    assert json.loads(path.read_text()) == holder


def test_a_file_that_another_has_taken_over_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that find a lock stale, the slower must not remove the lock of the faster."""
    monkeypatch.setattr(_lock, "_fcntl", lambda: None)
    path = tmp_path / "writer.lock.exclusive"
    path.write_text(json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "started": "1"}))
    faster: list[WriterLock] = []

    def is_gone(holder: dict[str, object]) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(_lock, "_fcntl", lambda: None)
        faster.append(WriterLock(tmp_path))  # Between the look and the removal.
        return True

    monkeypatch.setattr(_lock, "_is_gone", is_gone)
    with pytest.raises(LockError, match=f"process {os.getpid()}|by another writer at this moment"):
        WriterLock(tmp_path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not (tmp_path / "writer.lock.exclusive.stale").exists()
    faster[0].release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "writer.lock").symlink_to(target)
    with pytest.raises(LockError, match="cannot be opened for writing"):
        WriterLock(folder)
    assert target.read_text() == "precious"


def test_a_forked_child_that_lives_on_does_not_block(way: str, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from opt_checkpoint._disk import lock as _lock\n"
        "from opt_checkpoint.errors import LockError\n"
        f"if {way == 'file'}: _lock._fcntl = lambda: None\n"
        "lock = _lock.WriterLock(Path(sys.argv[1]))\n"
        "if child := os.fork():\n"
        "    lock.check(); sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: lock.check()\n"
        "except LockError as error: print(os.getpid(), error, flush=True)\n"
        "lock.release(); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    child, message = process.stdout.readline().split(maxsplit=1)
    try:
        assert "the lock is that of the process that this one was forked from" in message
        with pytest.raises(LockError, match=f"process {process.pid} on"):
            WriterLock(tmp_path)
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
        os.kill(int(child), 0)
        WriterLock(tmp_path).release()
    finally:
        os.kill(int(child), signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()
