"""Training that is stopped and goes on: in a new process, in a window, on other devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import opt_accumulate
import optax
import pytest
from elastic_case import (
    OTHER_RULES,
    RULES,
    abstract,
    adamw,
    assert_same_bits,
    bits,
    compile_step,
    create,
    difference,
    make_mesh,
)
from opt_checkpoint import Checkpointer, plan_restore

SAVED_AT, STEPS = 10, 30
HERE = Path(__file__).parent

# Restores the latest checkpoint of a folder on 4x2, and makes the steps that are left.
GO_ON = """
import sys
sys.path.insert(0, sys.argv[1])
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
from elastic_case import *
from opt_checkpoint import Checkpointer, plan_restore
mesh = make_mesh(4, 2)
target = abstract(adamw(), mesh, zero=True)
saved = Checkpointer(sys.argv[2], read_only=True).latest_valid()
optimizer, step = plan_restore(saved, target).apply(), compile_step(target, mesh)
losses = []
for i in range(saved.read_extras()["position"], int(sys.argv[3])):
    optimizer, loss = step(optimizer, i)
    losses.append(float(loss))
np.savez(sys.argv[4], losses=losses, **bits(optimizer))
"""


def go_on(step: Callable[..., Any], optimizer: Any, start: int, stop: int) -> tuple[Any, list[Any]]:
    losses = []
    for i in range(start, stop):
        optimizer, loss = step(optimizer, i)
        losses.append(float(loss))
    return optimizer, losses


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run on 4x2 with ZeRO: saved after ten steps, and what it became after 30 and 40."""
    folder, mesh = tmp_path_factory.mktemp("run"), make_mesh(4, 2)
    target = abstract(adamw(), mesh, zero=True)
    step = compile_step(target, mesh)
    optimizer, _ = go_on(step, create(target), 0, SAVED_AT)
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(SAVED_AT, optimizer, extras={"position": SAVED_AT})
    run: dict[str, Any] = {"folder": folder, "at_10": bits(optimizer)}
    optimizer, losses = go_on(step, optimizer, SAVED_AT, STEPS)
    run["at_30"] = bits(optimizer)
    optimizer, more = go_on(step, optimizer, STEPS, STEPS + SAVED_AT)
    return run | {"at_40": bits(optimizer), "losses": losses + more}


@pytest.mark.slow
def test_a2_resumed_in_a_new_process_on_the_same_mesh_is_equal_to_the_bit(
    saved_run: dict[str, Any], tmp_path: Path
) -> None:
    """A2: saved at step 10, resumed to 30 in a new process: all leaves, all losses."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    subprocess.run(
        [sys.executable, "-c", GO_ON, HERE, saved_run["folder"], str(STEPS), tmp_path / "found"],
        env=clean | {"JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=300,
    )
    found = dict(np.load(tmp_path / "found.npz"))
    assert found.pop("losses").tolist() == saved_run["losses"][: STEPS - SAVED_AT]
    assert len(found) == 4 + 1 + 2 * 4 + 2  # parameters, step, moments, two counts
    assert_same_bits(found, saved_run["at_30"])


K = 2
WINDOWS: dict[str, Any] = {
    "ours": lambda tx: opt_accumulate.MultiSteps(tx, K),
    "optax": lambda tx: optax.MultiSteps(tx, K),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("windows", WINDOWS)
def test_a3_resumed_in_every_mini_step_of_a_window_is_equal_to_the_bit(
    windows: str, tmp_path: Path
) -> None:
    """A3: resumed mid-accumulation, for every mini_step from 0 to k-1."""
    mesh = make_mesh(4, 2)
    target = abstract(adamw(WINDOWS[windows]), mesh, zero=True)
    step = compile_step(target, mesh)
    starts, stop = range(2 * K, 3 * K), 4 * K + 1
    optimizer, _ = go_on(step, create(target), 0, starts[0])
    losses = []
    with Checkpointer(tmp_path) as checkpointer:
        for i in range(starts[0], stop):
            if i in starts:
                checkpointer.save(i, optimizer)
            optimizer, loss = step(optimizer, i)
            losses.append(float(loss))
    for start in starts:
        saved = Checkpointer(tmp_path, read_only=True).at(start)
        mini_steps = [x.value for x in saved.schema.leaves if x.path[-1] == "mini_step"]
        assert mini_steps == [start % K]
        found, others = go_on(step, plan_restore(saved, target).apply(), start, stop)
        assert others == losses[start - starts[0] :]
        assert_same_bits(bits(found), bits(optimizer))


ELSEWHERE = {
    "2x4": (2, 4, RULES, True),
    "1x8": (1, 8, RULES, True),
    "4 devices": (2, 2, RULES, True),
    "1 device": (1, 1, RULES, False),
    "4x2, other rules": (4, 2, OTHER_RULES, False),
    "2x4, other rules, ZeRO": (2, 4, OTHER_RULES, True),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ELSEWHERE)
def test_a5_thirty_steps_on_other_devices_agree(saved_run: dict[str, Any], where: str) -> None:
    """A5: saved on 4x2 with ZeRO, restored to the bit elsewhere, and 30 steps on: within 1e-5."""
    data, model, rules, zero = ELSEWHERE[where]
    mesh = make_mesh(data, model)
    target = abstract(adamw(), mesh, rules=rules, zero=zero)
    saved = Checkpointer(saved_run["folder"], read_only=True).latest_valid()
    assert saved is not None
    optimizer = plan_restore(saved, target).apply()
    for leaf, place in zip(jax.tree.leaves(optimizer), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == place.sharding
    assert_same_bits(bits(optimizer), saved_run["at_10"])
    optimizer, losses = go_on(compile_step(target, mesh), optimizer, SAVED_AT, SAVED_AT + 30)
    np.testing.assert_allclose(losses, saved_run["losses"], rtol=1e-5)
    assert difference(bits(optimizer), saved_run["at_40"]) < 1e-5


@pytest.mark.slow
def test_a6_a_run_has_one_result() -> None:
    """With and without donation, and again, in windows of two mini-steps, with ZeRO on 4 x 2."""
    mesh = make_mesh(4, 2)
    target = abstract(adamw(WINDOWS["ours"]), mesh, zero=True)
    results = []
    for donate in (True, False):
        step = compile_step(target, mesh, donate=donate)
        for _ in range(5):
            optimizer, _ = go_on(step, create(target), 0, 6)
            results.append(bits(optimizer))
    for result in results[1:]:
        assert_same_bits(result, results[0])
