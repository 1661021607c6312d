"""What a step holds on a GPU or TPU: nothing twice, one piece of a leaf, moments on the host."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_precision as op
import optax
import pytest
from accelerator import (
    EXACT_ADAMW,
    assert_equal,
    make_grads,
    make_params,
    memory_kinds,
    needs_host_memory,
)
from opt_accumulate import MultiSteps, guard, with_average

pytestmark = pytest.mark.accelerator

PIECE = 64 << 10
EIGHT = op.dynamic8()


def coded(tx: Any, **options: Any) -> Any:
    """Weights in bfloat16, moments in 8 bits, in pieces of 64 KiB."""
    return op.stochastic_weights(op.quantize_state(tx, EIGHT, chunk_bytes=PIECE, **options))


WRAPPED: dict[str, Any] = {
    "stochastic": coded(optax.adamw(1e-3)),
    "remainder": op.master_weights(
        op.quantize_state(optax.adamw(1e-3), op.float8()), storage="remainder"
    ),
    "kahan": op.master_weights(
        op.quantize_state(optax.adamw(1e-3), op.bfloat16()), storage="kahan"
    ),
    "windows": MultiSteps(coded(optax.adamw(1e-3)), 2),
    "average": with_average(optax.adamw(1e-3), 0.9),
    "guard": guard(with_average(optax.adamw(1e-3), 0.9), loss=None),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_donated_step_holds_nothing_twice(name: str) -> None:
    tx = WRAPPED[name]
    params = make_params(jnp.float32 if name in ("average", "guard") else jnp.bfloat16)
    state, grads = tx.init(params), make_params()
    # Flags and counters may get other memory.
    leaves = [leaf for leaf in jax.tree.leaves((params, state)) if leaf.size > 1]
    size = sum(leaf.nbytes for leaf in leaves)
    compiled = jax.jit(tx.apply, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    compiled(params, state, grads)
    assert all(leaf.is_deleted() for leaf in leaves)


COPIED = pytest.mark.skipif(
    jax.default_backend() == "cpu", reason="XLA for CPUs copies bfloat16 arguments as integers"
)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=COPIED)])
def test_temporaries_are_those_of_a_piece(dtype: str) -> None:
    shapes = {f"w{i}": jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16) for i in range(8)}
    grads = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in shapes.items()}
    tx = coded(optax.adamw(1e-3))
    state = jax.eval_shape(tx.init, shapes)
    compiled = jax.jit(tx.apply, donate_argnums=(0, 1)).lower(shapes, state, grads).compile()
    memory: Any = compiled.memory_analysis()
    number = sum(leaf.size for leaf in shapes.values())
    assert tx.temporary_bytes(shapes) < number  # a byte for each parameter: no decoded leaf
    assert memory.temp_size_in_bytes <= tx.temporary_bytes(shapes)


def train(tx: Any, params: Any) -> tuple[Any, Any]:
    state, step = tx.init(params), jax.jit(tx.apply, donate_argnums=(0, 1))
    before = memory_kinds(state)
    params = jax.tree.map(jnp.copy, params)
    for number in range(3):
        lies = jax.tree.map(lambda p: p.sharding, params)
        params, state = step(params, state, jax.device_put(make_grads(number, params), lies))
    assert memory_kinds(state) == before
    return params, state


@needs_host_memory
@pytest.mark.parametrize("codec", [op.identity(), EIGHT], ids=str)
def test_moments_stay_on_the_host(codec: Any) -> None:
    hosted = op.offload_state(EXACT_ADAMW)
    ours, theirs = (
        op.stochastic_weights(op.quantize_state(tx, codec, chunk_bytes=PIECE))
        for tx in (hosted, EXACT_ADAMW)
    )
    params, state = train(ours, make_params(jnp.bfloat16))
    assert set(memory_kinds(state.inner[0].mu)) == {"pinned_host"}
    assert set(memory_kinds(state.inner[0].nu)) == {"pinned_host"}
    assert set(memory_kinds((params, state.step))) == {"device"}
    assert_equal((params, state), train(theirs, make_params(jnp.bfloat16)))
