"""Runs that are resumed on GPUs or TPUs, bit for bit, and checkpoints on other meshes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_precision as op
import optax
import pytest
from accelerator import (
    COUNT,
    EXACT_ADAMW,
    FIRST,
    assert_equal,
    make_grads,
    make_params,
    memory_kinds,
    mesh_of,
    needs_host_memory,
    normal,
    over,
)
from jax.sharding import Mesh, NamedSharding
from opt_accumulate import MultiSteps, guard, with_average
from opt_checkpoint import Checkpointer
from opt_core import Optimizer
from opt_matrix import Matrices, muon

pytestmark = pytest.mark.accelerator

EIGHT = op.dynamic8()


def coded(tx: Any, **options: Any) -> Any:
    """Weights in bfloat16 and moments in 8 bits."""
    return op.stochastic_weights(op.quantize_state(tx, EIGHT, **options))


ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-2, 10))
TXS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: ADAMW,
    "muon": lambda: muon(1e-2, matrices=Matrices.by_rank2()),
    "stochastic": lambda: coded(ADAMW),
    "remainder": lambda: op.master_weights(
        op.quantize_state(ADAMW, op.float8()), storage="remainder"
    ),
    "kahan": lambda: op.master_weights(op.quantize_state(ADAMW, op.log8()), storage="kahan"),
    "windows": lambda: MultiSteps(coded(ADAMW), 4),  # saved in the middle of one
    "guard": lambda: guard(with_average(ADAMW, 0.9), loss=None),
}


@jax.jit
def step(optimizer: Optimizer, grads: Any) -> Optimizer:
    return optimizer.apply_gradient(grads)


def through(folder: Path, optimizer: Optimizer, target: Optimizer) -> Optimizer:
    """What is read of what was saved."""
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, optimizer)
    with Checkpointer(folder, read_only=True) as checkpointer:
        return checkpointer.restore(1, target)


@pytest.mark.parametrize("name", TXS)
def test_a_resumed_run_is_the_run(name: str, tmp_path: Path) -> None:
    definition = opt.OptaxWrapper(TXS[name]())

    def create() -> Optimizer:
        made: Optimizer = definition.create(make_params(jnp.bfloat16))
        return made

    run, grads = create(), [make_grads(number, make_params()) for number in range(8)]
    for each in grads[:6]:
        run = step(run, each)
    resumed = through(tmp_path, run, create())
    assert_equal(resumed, run)
    assert {leaf.device for leaf in jax.tree.leaves(resumed)} == {FIRST}
    for each in grads[6:]:
        run, resumed = step(run, each), step(resumed, each)
    assert_equal(resumed, run)
    assert np.asarray(run.target["w"] != create().target["w"]).mean() > 0.1


def on_mesh(tx: Any, params: Any, mesh: Mesh) -> Optimizer:
    """An optimizer whose counters lie on a mesh as well."""

    def placed(leaf: jax.Array) -> jax.Array:
        is_there = isinstance(leaf.sharding, NamedSharding)
        return leaf if is_there else jax.device_put(leaf, over(mesh))

    made: Optimizer = jax.tree.map(placed, opt.OptaxWrapper(tx).create(params))
    return made


@pytest.mark.parametrize("is_hosted", [False, pytest.param(True, marks=needs_host_memory)])
@pytest.mark.parametrize("count", sorted({1, max(1, COUNT // 2), COUNT}))
def test_any_mesh_reads_what_all_devices_wrote(count: int, is_hosted: bool, tmp_path: Path) -> None:
    values = {"w": normal(0, 64 * COUNT, 256).astype(jnp.bfloat16)}
    inner = op.offload_state(EXACT_ADAMW) if is_hosted else EXACT_ADAMW

    def create(devices: int) -> tuple[Optimizer, Any]:
        mesh = mesh_of(devices)
        lies = {"w": over(mesh, "data")}
        return on_mesh(coded(inner, layout=lies), jax.device_put(values, lies), mesh), lies

    (saved, across), (target, lies) = create(COUNT), create(count)
    saved = step(saved, jax.device_put(make_grads(0, values), across))
    restored = through(tmp_path, saved, target)
    assert_equal(restored, saved)
    for leaf, like in zip(*map(jax.tree.leaves, (restored, target)), strict=True):
        assert leaf.sharding == like.sharding
    assert ("pinned_host" in memory_kinds(restored)) == is_hosted
    grads = make_grads(1, values)
    found = step(restored, jax.device_put(grads, lies))
    assert_equal(found, step(saved, jax.device_put(grads, across)))
