"""Accumulation, averages and guards on GPUs or TPUs: the numbers of the CPU, one sum a step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from accelerator import (
    COUNT,
    assert_close,
    assert_equal,
    make_grads,
    make_params,
    memory_kinds,
    mesh_of,
    needs_several,
    on_both,
    over,
)
from opt_accumulate import (
    MultiSteps,
    Reason,
    accumulate_gradients,
    guard,
    report,
    rollback,
    with_average,
)
from opt_partition import read_collectives

pytestmark = pytest.mark.accelerator

ADAMW = optax.adamw(1e-2)
TXS: dict[str, Any] = {
    "windows": MultiSteps(ADAMW, 2),
    "average": with_average(ADAMW, 0.9, warmup=True),
    "guard": guard(with_average(ADAMW, 0.9), loss=None),
}
GUARDED = guard(with_average(ADAMW, 0.9))


def train(tx: Any, grads: Any, **extra: Any) -> tuple[Any, Any]:
    """A step in place for each gradient."""
    params = make_params()
    state, step = tx.init(params), jax.jit(tx.apply, donate_argnums=(0, 1))
    for each in grads:
        params, state = step(params, state, each, **extra)
    return params, state


def some_grads(number: int) -> list[Any]:
    return [make_grads(seed, make_params()) for seed in range(number)]


@pytest.mark.parametrize("name", TXS)
def test_the_cpu_has_the_same_numbers(name: str) -> None:
    found, expected = on_both(lambda _: train(TXS[name], some_grads(5)))
    assert_close(found, expected)


@pytest.mark.parametrize(("spoilt", "loss"), [("b", 1.0), ("", math.nan)])
def test_a_bad_step_leaves_every_bit(spoilt: str, loss: float) -> None:
    params, state = train(GUARDED, some_grads(3), loss=jnp.float32(1.0))
    grads = some_grads(1)[0]
    bad = {k: np.where(k == spoilt, np.float32(math.nan), g) for k, g in grads.items()}
    step = jax.jit(GUARDED.apply)
    after, skipped = step(params, state, bad, loss=jnp.float32(loss))
    assert_equal((after, skipped.inner), (params, state.inner))
    assert int(report(skipped).skipped) == 1
    assert Reason(int(report(skipped).reason)) == Reason.NONFINITE
    moved, _ = step(after, skipped, grads, loss=jnp.float32(1.0))
    assert np.abs(np.asarray(moved["w"] - params["w"])).min() > 0


def test_a_rollback_brings_states_back_from_the_host() -> None:
    good = rollback(keep=1)
    params, state = train(GUARDED, some_grads(3), loss=jnp.float32(1.0))
    assert good.take(3, (params, state))
    expected = jax.device_get((params, state))
    jax.jit(GUARDED.apply, donate_argnums=(0, 1))(
        params, state, some_grads(1)[0], loss=jnp.float32(1.0)
    )
    number, restored = good.restore()
    assert number == 3
    assert_equal(restored, expected)
    assert set(memory_kinds(restored)) == {"device"}


# Microbatches: whole numbers, whose sums are exact in any order.


def whole_numbers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


WEIGHTS = {"w": whole_numbers(0, 64, 4 * COUNT), "v": whole_numbers(1, 64, 2 * COUNT)}
BATCH = {"x": whole_numbers(2, 16 * COUNT, 64), "mask": whole_numbers(3, 16 * COUNT) > 0}


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    rows = sum(jnp.square(batch["x"] @ leaf).sum(-1) for leaf in params.values())
    return jnp.where(batch["mask"], rows, 0.0).sum(), batch["mask"].sum()


def whole_batch() -> Any:
    total, grads = jax.value_and_grad(lambda params: loss_fn(params, BATCH)[0])(WEIGHTS)
    weight = BATCH["mask"].sum()
    return total / weight, jax.tree.map(lambda g: g / weight, grads)


def test_microbatches_have_the_gradient_of_the_batch() -> None:
    with jax.default_matmul_precision("highest"):
        found = jax.jit(accumulate_gradients(loss_fn, num_microbatches=4))(WEIGHTS, BATCH)
        assert_close(found, whole_batch(), rtol=1e-6, atol=0)


@needs_several
@pytest.mark.parametrize("num", [2, 8])
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "zero2"])
def test_gradients_are_summed_once_in_a_step(num: int, is_split: bool) -> None:
    mesh = mesh_of()
    lies = over(mesh, None, "data") if is_split else over(mesh)
    value_and_grad = accumulate_gradients(
        loss_fn,
        num_microbatches=num,
        reduce="deferred",
        mesh=mesh,
        out_shardings=dict.fromkeys(WEIGHTS, lies) if is_split else None,
    )
    args = jax.device_put(WEIGHTS, over(mesh)), jax.device_put(BATCH, over(mesh, "data"))
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(value_and_grad).lower(*args).compile()
        expected = whole_batch()
    rows = read_collectives(compiled)
    assert {row.count for row in rows} == {1}
    # Compilers for GPUs join sums. With the gradients go the loss and its weight.
    numbers = sum(math.prod(row.operand_shape) for row in rows)
    assert numbers == sum(leaf.size for leaf in WEIGHTS.values()) + 2
    kinds = {row.kind for row in rows if row.operand_shape}
    assert kinds == {"reduce-scatter" if is_split else "all-reduce"}
    loss, grads = compiled(*args)
    for leaf in jax.tree.leaves(grads):
        assert leaf.sharding.is_equivalent_to(lies, leaf.ndim)
    assert_close((loss, grads), expected, rtol=1e-6, atol=0)


@needs_several
def test_what_is_bad_on_one_device_is_skipped_on_all() -> None:
    mesh = mesh_of()
    params = {"w": jax.device_put(whole_numbers(0, 16 * COUNT, 64), over(mesh, "data"))}
    grads = jax.tree.map(lambda p: np.asarray(p).copy(), params)
    grads["w"][-1, -1] = math.nan
    tx = guard(with_average(ADAMW, 0.9), loss=None)
    state, bad = tx.init(params), jax.device_put(grads, over(mesh, "data"))
    compiled = jax.jit(tx.apply).lower(params, state, bad).compile()
    # The norm alone is summed: the average adds nothing.
    assert {math.prod(row.shape) for row in read_collectives(compiled)} == {1}
    after, skipped = compiled(params, state, bad)
    assert_equal((after, skipped.inner), (params, state.inner))
    assert int(skipped.skipped) == 1
