"""Checkpoints whose bytes are not those that were written, and runs that resume past them."""

import gc
import json
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_testing import everything, files, same, sealed, small_state, state
from opt_checkpoint import (
    Checkpointer,
    Rename,
    SavedStep,
    TrainingState,
    _step,
    named_state,
    open_step,
)
from opt_checkpoint.errors import (
    CheckpointError,
    DamagedError,
    MissingError,
    PlanError,
    SaveError,
    VersionError,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def saved_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, small_state(1), metadata={"tokens": 12})
    return folder / "1"


@pytest.fixture
def step(saved_step: Path, tmp_path: Path) -> Path:
    """The folder of a small step."""
    return Path(shutil.copytree(saved_step, tmp_path / "1"))


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(20))
def test_e1_single_bit_flips(step: Path, seed: int) -> None:
    """24 single-bit flips over all files: each raises or is exact."""
    rng = random.Random(seed)
    targets = [path for path in files(step) if path.stat().st_size]
    outcomes = {"raised": 0, "exact": 0}
    for i in range(24):
        path = targets[i % len(targets)]
        data = path.read_bytes()
        flipped = bytearray(data)
        bit = rng.randrange(len(data) * 8)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        outcomes[outcome(step)] += 1
        path.write_bytes(data)
    assert outcomes["raised"] > 4  # Some files are not read at all.
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
    manifest = (tmp_path / "a/1/leaves/manifest.json").read_bytes()
    shutil.rmtree(tmp_path / "a/1/leaves")
    shutil.copytree(tmp_path / "b/1/leaves", tmp_path / "a/1/leaves")
    path = tmp_path / "a/1/leaves/manifest.json"
    body = json.loads(manifest)["manifest"]
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
    manifest = (step / "leaves/manifest.json").read_bytes()
    shutil.rmtree(step / "leaves")
    shutil.copytree(tmp_path / "other/1/leaves", step / "leaves")
    (step / "leaves/manifest.json").write_bytes(manifest)
    with pytest.raises(DamagedError, match="`params/w` is missing"):
        open_step(step).validate()


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
        saved.validate()


# A run resumes from the latest step that is whole, and reads it once

TX = optax.adam(0.1)


def trained(value: float) -> TrainingState:
    rng = np.random.default_rng(int(value))
    params = {"w": jnp.asarray(rng.standard_normal((64, 32)), jnp.float32)}
    _, opt_state = TX.update(params, TX.init(params))
    return TrainingState(TX, params, opt_state, int(value))


def abstract(tx: optax.GradientTransformation = TX) -> Any:
    params = {"w": jnp.zeros((64, 32))}
    return jax.eval_shape(lambda: TrainingState(tx, params, tx.init(params)))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with Checkpointer(folder) as checkpointer:
        for n in (1, 2, 3):
            rng = jax.random.normal(jax.random.key(n), (3,))
            checkpointer.save(n, trained(n), extras={"position": 10 * n, "noise": rng})
    return folder


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    logging.disable(logging.NOTSET)
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message.split(":")[0] for r in caplog.records if r.name.startswith("opt_checkpoint")]


def test_the_latest_step_is_restored_and_read_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = _step.restore_arrays

    def counted(folder: Path, item: Any, restore_args: Any) -> Any:
        read.append(folder.name)
        return original(folder, item, restore_args)

    monkeypatch.setattr("opt_checkpoint._step.restore_arrays", counted)
    checkpointer = Checkpointer(run, read_only=True)
    restored = checkpointer.restore_latest(abstract())
    assert same(named_state(restored), named_state(trained(3)))
    assert checkpointer.restored_step == 3
    assert read == ["3", "3"]  # the optimizer, then the array among the extras
    assert checkpointer.at(3).read_extras()["position"] == 30


def test_e4_latest_is_damaged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The latest steps are damaged and one is good: falls back and warns; strict raises."""
    flip_arrays(run / "3")
    (run / "2/leaves/manifest.json").write_bytes(b"{")
    with Checkpointer(run) as checkpointer:
        restored = checkpointer.restore_latest(abstract())
        assert same(named_state(restored), named_state(trained(1)))
        assert checkpointer.restored_step == 1
        assert warned(caplog) == ["step 3 is passed over", "step 2 is passed over"]
        valid = checkpointer.latest_valid()
        assert valid is not None
        assert valid.step == 3  # only arrays are damaged
        assert checkpointer.latest_step() == 3
        for call in (lambda: checkpointer.restore(3, abstract()), lambda: checkpointer.at(2)):
            with pytest.raises(DamagedError):
                call()
        for step, words in (
            (2, "call `discard_after` first"),
            (4, r"passed over \[2, 3\].*after\(1\)"),
        ):
            with pytest.raises(SaveError, match=words):
                checkpointer.save(step, restored)
        assert checkpointer.discard_after(1) == [2, 3]
        checkpointer.save(2, restored)
        checkpointer.wait()
        checkpointer.validate(2)
        for step in (1, 2):
            flip_arrays(run / str(step))
        with pytest.raises(MissingError, match=r"none of the steps \[1, 2\] is valid"):
            checkpointer.restore_latest(abstract())


def test_damaged_extras_are_a_damaged_step(tmp_path: Path) -> None:
    extras = {"noise": jax.random.normal(jax.random.key(0), (128, 128))}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, trained(step), extras=extras)
        checkpointer.wait()
        flip_arrays(tmp_path / "2")
        checkpointer.restore(2, abstract())  # the extras are not read
        with pytest.raises(DamagedError):
            checkpointer.at(2).check_extras()
        checkpointer.restore_latest(abstract())
        assert checkpointer.restored_step == 1


def test_what_does_not_fit_is_no_damage(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = Checkpointer(run, read_only=True)
    target = abstract(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(PlanError, match=r"!\+ state/trace/trace/w"):
        checkpointer.restore_latest(target)
    assert not warned(caplog)
    restored = checkpointer.restore_latest(
        target,
        allow=iter(["drop", "optimizer"]),  # an iterator: it is looked at once
        rules=[("state/trace/trace/w", Rename("state/adam/mu/w"))],
    )
    assert (restored.opt_state[0].trace["w"] == trained(3).opt_state[0].mu["w"]).all()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: no memory"), VersionError("newer")]
)
def test_no_memory_and_a_newer_version_are_no_damage(
    error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with pytest.raises(type(error)):
        Checkpointer(run, read_only=True).restore_latest(abstract())


def test_a_step_that_goes_while_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, max_to_keep=1) as writer:
        writer.save(1, trained(1))
        writer.wait()
        saved = writer.at(1)
        original = Checkpointer.at

        def at(self: Checkpointer, step: int) -> SavedStep:
            opened = original(self, step)
            assert opened.step == step
            if step == 1:
                writer.save(2, trained(2))
                writer.wait()
            return opened

        monkeypatch.setattr(Checkpointer, "at", at)
        reader = Checkpointer(tmp_path, read_only=True)
        assert int(reader.restore_latest(abstract()).step) == 2
        with pytest.raises(MissingError, match="has been deleted"):
            saved.validate()
