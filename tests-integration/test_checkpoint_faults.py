"""Checkpoints on a disk that is full, read-only or shared, and in the order of a power cut."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_checkpoint import Checkpointer, LeafInfo, NamedState, Schema
from opt_checkpoint.errors import CheckpointError, MissingError, SaveError
from opt_core.extend import split_path

pytestmark = pytest.mark.faults

SHAPE = (256, 256)
MODES = pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])


def state(seed: int, shape: tuple[int, ...] = SHAPE) -> NamedState:
    rng = np.random.default_rng(seed)
    leaves = {
        f"params/w{i}": jnp.asarray(rng.standard_normal(shape), jnp.float32) for i in range(2)
    }
    infos = (LeafInfo(split_path(name), shape, "float32", "params") for name in leaves)
    return NamedState(leaves, Schema(tuple(infos)))


def check(root: Path, step: int, seed: int, shape: tuple[int, ...] = SHAPE) -> None:
    """A step holds what was saved, bit for bit."""
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(state(seed, shape))
    )
    read = Checkpointer(root, read_only=True).at(step).read(wanted)
    for name, leaf in state(seed, shape).items():
        np.testing.assert_array_equal(np.asarray(read[name]), np.asarray(leaf))


def save_now(checkpointer: Checkpointer, step: int, named: NamedState) -> None:
    checkpointer.save(step, named)
    checkpointer.wait()


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Any write past a size of file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of a few megabytes, where the machine lets us mount one."""
    mounted = []

    def make(megabytes: int) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no disk of our own: mounting is not allowed here")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def child(code: str, *args: Any) -> subprocess.Popen[str]:
    """Runs code in a process of its own, with this module's names."""
    here = Path(__file__)
    prelude = (
        f"import sys; sys.path.insert(0, {str(here.parent)!r})\n"
        f"from {here.stem} import *\nroot = Path(sys.argv[1])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.sample(1)
@MODES
def test_d3_saving_a_step_again(async_save: bool, tmp_path: Path) -> None:
    """Out of space while saving over a step: the old copy stays, for none is touched."""
    with Checkpointer(tmp_path, async_save=async_save) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(SaveError, match="step 1 is not saved"):
            checkpointer.save(1, state(2))
        check(tmp_path, 1, 1)
        checkpointer.save(2, state(2))
        checkpointer.discard_after(1)
        with small_files(100_000), pytest.raises(SaveError):
            save_now(checkpointer, 2, state(3))
        assert checkpointer.steps() == [1]
    check(tmp_path, 1, 1)


@pytest.mark.sample(1)
@MODES
def test_d4_disk_is_full(async_save: bool, tmp_path: Path, disk: Callable[[int], Path]) -> None:
    """Out of space: a typed error at save or wait, older steps whole, the next save works."""
    shape = (1024, 256)
    root = disk(6)
    with Checkpointer(root, async_save=async_save) as checkpointer:
        save_now(checkpointer, 1, state(1, shape))
        ballast = root / "ballast"
        ballast.write_bytes(bytes(3 * 2**20))
        with pytest.raises(SaveError, match=r"step 2 in .* not saved: "):
            save_now(checkpointer, 2, state(2, shape))
        assert checkpointer.steps() == [1]
        check(root, 1, 1, shape)
        ballast.unlink()
        save_now(checkpointer, 2, state(2, shape))
        check(root, 2, 2, shape)


def test_d5_no_place_to_write(tmp_path: Path) -> None:
    """A file in the way, a folder that cannot be written, a missing parent."""
    file = tmp_path / "file"
    file.write_text("")
    for root, words in (
        (file / "root", "cannot be made: Not a directory"),
        (file, "cannot be made: File exists"),
        ("/proc/self/checkpoints", "cannot be made|cannot be opened"),  # even for the superuser
    ):
        with pytest.raises(CheckpointError, match=words):
            Checkpointer(root)
    with Checkpointer(tmp_path / "missing", read_only=True) as reader:
        assert reader.steps() == []
        with pytest.raises(MissingError, match="has no step 1; it has none"):
            reader.at(1)
    with Checkpointer(tmp_path / "a/b/c") as checkpointer:
        checkpointer.save(1, state(1))
    check(tmp_path / "a/b/c", 1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_d7_error_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the background is raised by the next call, or by `close`, once."""
    from opt_checkpoint._handler import Saving

    encode = Saving.encode

    def broken(self: Saving, sums: Any) -> bytes:
        if self.manifest.step % 2:
            raise OSError("the disk is gone")
        return encode(self, sums)

    monkeypatch.setattr(Saving, "encode", broken)
    words = r"step {} in .* not saved: OSError: the disk is gone"
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1))
        with pytest.raises(SaveError, match=words.format(1)):
            checkpointer.save(2, state(2))
        checkpointer.wait()
        checkpointer.save(2, state(2))
        checkpointer.save(3, state(3))
        with pytest.raises(SaveError, match=words.format(3)):
            checkpointer.wait()
        checkpointer.save(5, state(5))
        with pytest.raises(SaveError, match=words.format(5)):
            checkpointer.close()
        checkpointer.close()
        assert checkpointer.steps() == [2]
    assert list(tmp_path.glob("*tmp*")) == []
    with Checkpointer(tmp_path) as checkpointer:  # The folder was given back.
        checkpointer.save(6, state(6))
    check(tmp_path, 6, 6)


@pytest.mark.slow
def test_d8_two_writers(tmp_path: Path) -> None:
    """Two writers that know nothing of each other, at once: one wins, the other's is an error."""
    code = """
me = int(sys.argv[2])
jax.block_until_ready(dict(state(me)))
print("ready", flush=True)
for trial in range(20):
    sys.stdin.readline()
    try:
        with Checkpointer(root / str(trial)) as checkpointer:
            save_now(checkpointer, 1, state(me))
            print("saved", flush=True)
            sys.stdin.readline()
    except CheckpointError as error:
        print(type(error).__name__, flush=True)
        sys.stdin.readline()
"""
    writers = [child(code, tmp_path, me) for me in (1, 2)]
    assert [answer(process) for process in writers] == ["ready"] * 2
    for trial in range(20):
        for process in writers:
            tell(process)
        outcomes = [answer(process) for process in writers]
        for process in writers:
            tell(process)
        assert sorted(outcomes) == ["LockError", "saved"], outcomes
        check(tmp_path / str(trial), 1, 1 + outcomes.index("saved"))
    for process in writers:
        process.communicate(timeout=60)


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.sample(1)
@MODES
def test_d13_order_of_syncs(
    async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folders are synced, then renamed to the step's name, then the root is synced.

    Orbax writes two marks at the commit, which nothing depends on; they are synced after it.
    """
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(handle: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def spy_rename(source: Any, target: Any, **options: Any) -> None:
        events.append(("rename", str(target)))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    with Checkpointer(tmp_path, async_save=async_save) as checkpointer:
        checkpointer.save(1, state(1))
        checkpointer.wait()
    final = str(tmp_path / "1")
    commit = events.index(("rename", final))
    written = f"{tmp_path}/1.orbax-checkpoint-tmp"
    before = [path for event, path in events[:commit] if event == "sync"]
    marks = {"_CHECKPOINT_METADATA", "commit_success.txt"}
    for path in (tmp_path / "1").rglob("*"):
        assert path.name in marks or str(path).replace(final, written, 1) in before
    synced = [path for path in before if path.startswith(written)]
    assert synced[-1] == written
    for folder in filter(lambda p: Path(p.replace(written, final, 1)).is_dir(), synced):
        inside = [i for i, path in enumerate(synced) if path.startswith(folder + "/")]
        assert not inside or max(inside) < synced.index(folder)
    after = [path for event, path in events[commit:] if event == "sync"]
    assert {Path(path).name for path in after[:-2]} <= marks
    assert after[-2:] == [final, str(tmp_path)]
