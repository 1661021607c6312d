"""A run resumes from the latest step that is whole, and reads it once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_testing import same
from opt_checkpoint import Checkpointer, Rename, SavedStep, TrainingState, named_state
from opt_checkpoint._disk import orbax as _orbax
from opt_checkpoint.errors import DamagedError, MissingError, PlanError, VersionError

pytestmark = pytest.mark.usefixtures("optax_promotion")
TX = optax.adam(0.1)


def state(value: float) -> TrainingState:
    rng = np.random.default_rng(int(value))
    params = {"w": jnp.asarray(rng.standard_normal((64, 32)), jnp.float32)}
    _, opt_state = TX.update(params, TX.init(params))
    return TrainingState(TX, params, opt_state, int(value))


def abstract(tx: optax.GradientTransformation = TX) -> Any:
    params = {"w": jnp.zeros((64, 32))}
    return jax.eval_shape(lambda: TrainingState(tx, params, tx.init(params)))


def flip(step: Path, part: str) -> None:
    """Flips a bit in the file that holds the largest array."""
    path = max(step.glob(f"{part}/**/d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    logging.disable(logging.NOTSET)
    with Checkpointer(tmp_path) as checkpointer:
        for n in (1, 2, 3):
            rng = jax.random.normal(jax.random.key(n), (3,))
            checkpointer.save(n, state(n), extras={"position": 10 * n, "noise": rng})
    return tmp_path


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message.split(":")[0] for r in caplog.records if r.name.startswith("opt_checkpoint")]


def test_the_latest_step_is_restored_and_read_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = _orbax.restore_arrays

    def counted(folder: Path, item: Any, restore_args: Any) -> Any:
        read.append(folder.name)
        return original(folder, item, restore_args)

    monkeypatch.setattr(_orbax, "restore_arrays", counted)
    checkpointer = Checkpointer(run, read_only=True)
    restored = checkpointer.restore_latest(abstract())
    assert same(named_state(restored), named_state(state(3)))
    assert checkpointer.restored_step == 3
    assert read == ["3", "3"]  # the optimizer, then the array among the extras
    assert checkpointer.at(3).read_extras()["position"] == 30


def test_a_damaged_step_is_passed_over_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(run / "3", "leaves")
    (run / "2/manifest/manifest.json").write_bytes(b"{")
    with Checkpointer(run) as checkpointer:
        restored = checkpointer.restore_latest(abstract())
        assert same(named_state(restored), named_state(state(1)))
        assert checkpointer.restored_step == 1
        assert warned(caplog) == ["step 3 is passed over", "step 2 is passed over"]
        assert "expected the digest" in caplog.text or "cannot be read" in caplog.text


def test_damaged_extras_are_a_damaged_step(tmp_path: Path) -> None:
    extras = {"noise": jax.random.normal(jax.random.key(0), (512, 512))}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), extras=extras)
        checkpointer.wait()
        checkpointer.at(2).check_extras()
        flip(tmp_path / "2", "leaves")
        checkpointer.restore(2, abstract())  # the extras are not read
        with pytest.raises(DamagedError):
            checkpointer.at(2).check_extras()
        checkpointer.restore_latest(abstract())
        assert checkpointer.restored_step == 1


def test_where_there_is_none(tmp_path: Path) -> None:
    for checkpointer in (Checkpointer(tmp_path / "none", read_only=True), Checkpointer(tmp_path)):
        with checkpointer, pytest.raises(MissingError, match="has no step to restore"):
            checkpointer.restore_latest(abstract())
        assert checkpointer.restored_step is None


def test_where_every_step_is_damaged(run: Path) -> None:
    for step in ("1", "2", "3"):
        flip(run / step, "leaves")
    checkpointer = Checkpointer(run, read_only=True)
    with pytest.raises(MissingError, match=r"none of the steps \[1, 2, 3\] is valid"):
        checkpointer.restore_latest(abstract())
    assert checkpointer.restored_step is None


def test_what_does_not_fit_is_no_damage(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = Checkpointer(run, read_only=True)
    target = abstract(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(PlanError, match=r"!\+ state/trace/trace/w"):
        checkpointer.restore_latest(target)
    with pytest.raises(PlanError, match=r"!\+ state/trace/trace/w"):
        checkpointer.restore(2, target)
    assert not warned(caplog)
    restored = checkpointer.restore_latest(
        target,
        allow=iter(["drop", "optimizer"]),  # an iterator: it is looked at once
        rules=[("state/trace/trace/w", Rename("state/adam/mu/w"))],
    )
    assert (restored.opt_state[0].trace["w"] == state(3).opt_state[0].mu["w"]).all()


def test_a_newer_version_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Checkpointer.at

    def at(self: Checkpointer, step: int) -> SavedStep:
        if step == 3:
            raise VersionError("written by a newer version")
        return original(self, step)

    monkeypatch.setattr(Checkpointer, "at", at)
    with pytest.raises(VersionError):
        Checkpointer(run, read_only=True).restore_latest(abstract())


def test_a_step_by_its_number(run: Path) -> None:
    checkpointer = Checkpointer(run, read_only=True)
    assert same(named_state(checkpointer.restore(2, abstract())), named_state(state(2)))
    assert checkpointer.restored_step == 2
    with pytest.raises(MissingError, match="has no step 9"):
        checkpointer.restore(9, abstract())


def test_a_step_that_goes_while_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, max_to_keep=1) as writer:
        writer.save(1, state(1))
        writer.wait()
        original = Checkpointer.at

        def at(self: Checkpointer, step: int) -> SavedStep:
            opened = original(self, step)
            assert opened.step == step
            if step == 1:
                writer.save(2, state(2))
                writer.wait()
            return opened

        monkeypatch.setattr(Checkpointer, "at", at)
        reader = Checkpointer(tmp_path, read_only=True)
        assert int(reader.restore_latest(abstract()).step) == 2
