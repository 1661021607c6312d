"""State over several GPUs or TPUs: ZeRO moves what it should, and codes are those of one device."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from accelerator import (
    COUNT,
    FIRST,
    assert_near,
    bytes_on,
    mesh_of,
    needs_several,
    normal,
    over,
)
from opt_partition import Expected, init_sharded, memory_plan, verify

pytestmark = [pytest.mark.accelerator, needs_several]

TXS = {
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
SHAPES = {"wi": (64 * COUNT, 256), "wo": (256, 64 * COUNT)}
AXES = {"wi": ("embed", "mlp"), "wo": ("mlp", "embed")}
RULES = [("embed", None), ("mlp", None)]


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["wi"]) @ params["wo"] - batch))


def training_step(tx: Any) -> Any:
    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("name", TXS)
def test_zero_sums_each_gradient_once_and_gathers_each_parameter_once(name: str) -> None:
    tx, mesh = TXS[name], mesh_of()
    start = {k: 0.1 * normal(0, *shape) for k, shape in SHAPES.items()}
    batch = normal(1, 8 * COUNT, 64 * COUNT)
    plan = memory_plan(tx, start, AXES, RULES, mesh, zero="data", zero_min_bytes=0)
    layouts = plan.params, plan.state
    shardings = plan.params.shardings, plan.state.shardings
    params = jax.device_put(start, plan.params.shardings)
    state = init_sharded(tx, params, plan.state)
    assert bytes_on(FIRST, state) == plan.state.bytes_per_device
    with jax.default_matmul_precision("highest"):
        jitted = jax.jit(
            training_step(tx),
            in_shardings=(*shardings, over(mesh, "data")),
            out_shardings=shardings,
            donate_argnums=(0, 1),
        )
        lowered = jitted.lower(params, state, batch)
        single = jax.jit(training_step(tx))
        expected = single(*single(start, tx.init(start), batch), batch)
    compiled = lowered.compile()
    report = verify(compiled, Expected(inputs=layouts, outputs=layouts))
    matrices = [row for row in report.collectives if size_of(row) >= 64 * COUNT * 256]
    gathered = [row for row in matrices if row.kind == "all-gather"]
    summed = [row for row in matrices if row.kind in ("all-reduce", "reduce-scatter")]
    assert len(gathered) == len(summed) == len(SHAPES)
    assert len(matrices) == 2 * len(SHAPES)
    assert {row.count for row in matrices} == {1}
    batch = jax.device_put(batch, over(mesh, "data"))
    params, state = compiled(*compiled(params, state, batch), batch)
    assert bytes_on(FIRST, state) == plan.state.bytes_per_device
    assert_near((params, state), expected, tolerance=1e-3, share=1e-4)


def size_of(row: Any) -> int:
    sizes: list[int] = [math.prod(shape) for shape in (row.operand_shape, row.shape)]
    return max(sizes)
