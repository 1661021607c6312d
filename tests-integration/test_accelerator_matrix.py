"""Muon on GPUs or TPUs: the numbers of the CPU, and the collectives that were planned."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerator import COUNT, assert_near, mesh_of, needs_several, normal, on_both, over
from jax.sharding import AxisType
from opt_matrix import (
    Matrices,
    muon,
    newton_schulz,
    plan_matrices,
    scale_by_muon,
    scale_by_normuon,
    scale_by_soap,
)
from opt_partition import read_collectives

pytestmark = pytest.mark.accelerator

RANK2 = Matrices.by_rank2()
F32 = newton_schulz(dtype=None)
PARAMS = {f"w{n:02}": normal(n, 8 * COUNT, 16 * COUNT) for n in range(2 * COUNT)}


def train(tx: Any, params: Any, place: Callable[[Any], Any] = lambda tree: tree) -> Any:
    """Three steps in float32, which products on an accelerator have to be asked for."""
    with jax.default_matmul_precision("highest"):
        params, update = place(params), jax.jit(tx.update)
        state = jax.jit(tx.init)(params)
        for number in range(3):
            grads = place({k: normal(number, *p.shape) for k, p in params.items()})
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
    return params


def planned(scale: Any) -> Callable[[jax.Device, Any], Any]:
    def make(device: jax.Device, params: Any) -> Any:
        mesh = mesh_of(devices=[device])
        return optax.chain(scale(params, over(mesh).spec, mesh), optax.scale(-0.1))

    return make


# No basis changes in three steps: those of averages of few gradients are noise, on any device.
soap = functools.partial(scale_by_soap, refresh_every=100)
TXS: dict[str, Callable[[jax.Device, Any], Any]] = {
    "muon": lambda device, params: muon(0.1, matrices=RANK2, orthogonalize=F32),
    "normuon": planned(scale_by_normuon),
    "soap": planned(soap),
}


@pytest.mark.parametrize("name", TXS)
def test_the_cpu_has_the_same_numbers(name: str) -> None:
    params = {"w": normal(0, 128, 64), "v": normal(1, 64, 256)}
    found, expected = on_both(lambda device: train(TXS[name](device, params), params))
    assert_near(found, expected, tolerance=1e-4)


def test_iterations_in_bfloat16_end_near_orthogonal_matrices() -> None:
    x = jnp.asarray(normal(0, 4, 128, 256))
    with jax.default_matmul_precision("highest"):
        short, exact = (
            np.asarray(jax.jit(newton_schulz(8, "polar_express", dtype))(x), np.float32)
            for dtype in (jnp.bfloat16, None)
        )
    assert np.linalg.norm(short - exact) <= 0.05 * np.linalg.norm(exact)
    np.testing.assert_allclose(np.linalg.svd(exact, compute_uv=False), 1.0, atol=0.01)


@needs_several
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (("data", None), AxisType.Auto),
        ((None, "data"), AxisType.Auto),
        (("data", None), AxisType.Explicit),
    ],
    ids=["rows", "columns", "explicit"],
)
def test_what_moves_is_what_was_planned(spec: Any, kind: AxisType) -> None:
    mesh = mesh_of(kind=kind)
    sharding = over(mesh, *spec)
    plan = plan_matrices(PARAMS, sharding, mesh, RANK2, fn=F32)
    (group,) = plan.groups
    assert (group.choice, group.collectives) == ("all_to_all", 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(PARAMS, sharding)
        scale: Any = scale_by_muon(plan=plan)
        update = jax.jit(scale.update, donate_argnums=(0, 1))
        compiled = update.lower(placed, jax.jit(scale.init)(placed)).compile()
        plan.check(compiled)
        rows = read_collectives(compiled)
        assert [(row.kind, row.count) for row in rows] == [("all-to-all", 1)] * 2
        tx = muon(0.1, matrices=RANK2, plan=plan, orthogonalize=F32)
        found = train(tx, PARAMS, lambda tree: jax.device_put(tree, sharding))
    assert_near(found, train(muon(0.1, matrices=RANK2, orthogonalize=F32), PARAMS), tolerance=1e-4)
