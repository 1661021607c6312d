"""Checkpoints whose bytes are not those that were written."""

import gc
import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_testing import everything, files, same, sealed, small_state, state
from opt_checkpoint._disk.checkpointer import Checkpointer
from opt_checkpoint._disk.saved_step import SavedStep, open_step
from opt_checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MissingError,
    SaveError,
)

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The folder of a small step."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(1), metadata={"tokens": 12})
    return tmp_path / "1"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Orbax logs every failed read with its whole configuration."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def _dropped() -> Iterator[None]:
    """What Orbax dropped is collected in this module still."""
    yield
    gc.collect()


def outcome(step: Path) -> str:
    """Reads all of a step: `'exact'` or `'raised'`; wrong values or a raw error fail the test."""
    try:
        saved = open_step(step)
        read = saved.read(everything(saved.schema))
        assert saved.metadata == {"tokens": 12}
    except CheckpointError:
        return "raised"
    assert same(read, small_state(1))
    return "exact"


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(10))
def test_e1_single_bit_flips(step: Path, seed: int) -> None:
    """100 single-bit flips over all files: each raises or is exact."""
    rng = random.Random(seed)
    targets = [path for path in files(step) if path.stat().st_size]
    outcomes = {"raised": 0, "exact": 0}
    for i in range(100):
        path = targets[i % len(targets)]
        data = path.read_bytes()
        flipped = bytearray(data)
        bit = rng.randrange(len(data) * 8)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        outcomes[outcome(step)] += 1
        path.write_bytes(data)
    assert outcomes["raised"] > 20  # Some files are not read at all.
    assert outcome(step) == "exact"


def test_e2_truncated_and_deleted_files(step: Path) -> None:
    """Each file cut at 0, 25, 50, 75 and 99 %, and deleted: each raises or is exact."""
    outcomes = []
    for path in files(step):
        data = path.read_bytes()
        for percent in (0, 25, 50, 75, 99):
            path.write_bytes(data[: len(data) * percent // 100])
            outcomes.append(outcome(step))
        path.unlink()
        outcomes.append(outcome(step))
        path.write_bytes(data)
    assert "raised" in outcomes
    assert outcome(step) == "exact"


def test_e3_swapped_leaves(tmp_path: Path) -> None:
    """The bytes of two equal-shaped leaves swapped, their digests too: raises, and names a leaf."""
    x, y = jnp.arange(6.0), jnp.arange(6.0)[::-1]
    for name, leaves in {"a": (x, y), "b": (y, x)}.items():
        with Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(1, state({"state/x": leaves[0], "state/y": leaves[1]}))
    shutil.rmtree(tmp_path / "a/1/leaves")
    shutil.copytree(tmp_path / "b/1/leaves", tmp_path / "a/1/leaves")
    path = tmp_path / "a/1/manifest/manifest.json"
    body = json.loads(path.read_text())["manifest"]
    for digests in (body["digests"], body["digests"][::-1]):  # a digest is bound to a name
        path.write_bytes(sealed({**body, "digests": digests}))
        saved = open_step(tmp_path / "a/1")
        with pytest.raises(DamagedError, match="`state/x`: expected the digest "):
            saved.read(everything(saved.schema))


def flip_arrays(step: Path) -> None:
    """Flips a bit in the file that holds the largest array."""
    path = max(step.glob("leaves/**/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_e4_latest_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The latest step is damaged and two older are good: falls back and warns; strict raises."""
    logging.disable(logging.NOTSET)
    with Checkpointer(tmp_path) as checkpointer:
        for n in (1, 2, 3, 4):
            checkpointer.save(n, small_state(n))
        checkpointer.wait()
        flip_arrays(tmp_path / "4")
        (tmp_path / "3/manifest/manifest.json").write_bytes(b"{")
        assert not checkpointer.validate(4).ok
        assert checkpointer.validate(4, level="manifest").ok
        saved = checkpointer.latest_valid(level="digests")
        assert saved is not None
        assert saved.step == 2
        assert same(saved.read(everything(saved.schema)), small_state(2))
        warned = [r.message for r in caplog.records if r.name.startswith("opt_checkpoint")]
        assert [message.split(":")[0] for message in warned] == [
            "step 4 is passed over",
            "step 3 is passed over",
        ]
        assert checkpointer.latest_step() == 4
        with pytest.raises(DamagedError):
            checkpointer.at(4).read(everything(saved.schema))
        with pytest.raises(DamagedError):
            checkpointer.at(3)
        for step, words in ((3, "call `discard_after` first"), (5, r"passed over \[3, 4\]")):
            with pytest.raises(SaveError, match=words):
                checkpointer.save(step, small_state(step))
        assert checkpointer.discard_after(2) == [3, 4]
        checkpointer.save(3, small_state(3))
    with Checkpointer(tmp_path, read_only=True) as reader:
        assert reader.steps() == [1, 2, 3]
        assert reader.validate(3).ok


def test_a_step_under_another_number(step: Path) -> None:
    step.rename(step.with_name("2"))
    with (
        Checkpointer(step.parent, read_only=True) as checkpointer,
        pytest.raises(DamagedError, match="was saved as step 1, not 2"),
    ):
        checkpointer.at(2)


def test_validate_sees_arrays_that_the_manifest_has_not(step: Path, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(1, state({"state/x": jnp.zeros(3)}))
    shutil.rmtree(step / "leaves")
    shutil.copytree(tmp_path / "other/1/leaves", step / "leaves")
    report = open_step(step).validate(level="manifest")
    assert report.error is not None
    assert "`params/w`: expected float32[64, 32], found nothing" in report.error


def test_b10_released_formats(tmp_path: Path) -> None:
    """A stored checkpoint of every released format version loads bit-equal."""
    stored = sorted(FIXTURES.glob("format_*.zip"))
    assert [path.stem for path in stored] == ["format_1"]
    for path in stored:
        with ZipFile(path) as archive:
            archive.extractall(tmp_path / path.stem)
        saved = open_step(tmp_path / path.stem / "3")
        read = saved.read(everything(saved.schema))
        expected = np.load(path.with_suffix(".npz"))
        assert read.keys() == {*expected.files, "extra/key", "extra/position"}
        for name in expected.files:
            found = np.asarray(read[name])
            assert found.dtype == saved.schema.by_name[name].dtype
            assert found.tobytes() == expected[name].tobytes()
        assert saved.step == 3
        assert saved.metadata == {"tokens": 4096}
        extras = saved.read_extras({"key": jax.random.key(0), "position": 0})
        assert extras["position"] == 2**40
        assert jax.random.key_data(extras["key"]).tolist() == [0, 7]
        assert saved.validate().ok


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: no memory")])
def test_no_memory_is_no_damage(
    error: Exception, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("opt_checkpoint._disk.orbax.restore_arrays", fail)
    saved = open_step(step)
    with pytest.raises(type(error)):
        saved.read(everything(saved.schema))


def test_a_step_that_goes_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, max_to_keep=1) as writer:
        writer.save(1, small_state(1))
        writer.wait()
        saved = writer.at(1)
        assert saved.step == 1
        original = Checkpointer.at

        def at(self: Checkpointer, step: int) -> SavedStep:
            opened = original(self, step)
            assert opened.step == step
            if step == 1:
                writer.save(2, small_state(2))
                writer.wait()
            return opened

        monkeypatch.setattr(Checkpointer, "at", at)
        found = Checkpointer(tmp_path, read_only=True).latest_valid(level="digests")
        assert found is not None
        assert found.step == 2
    for read in (lambda: saved.read(everything(saved.schema)), saved.validate):
        with pytest.raises(MissingError, match="has been deleted"):
            read()
    with pytest.raises(MissingError, match="has been deleted"):
        _ = SavedStep(tmp_path / "1").manifest
