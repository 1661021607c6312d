"""Updates piece by piece: what they hold, what is compiled, and that the pieces change nothing."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import optax.contrib
import pytest
from precision_testing import (
    CODECS,
    bits,
    master_weights,
    quantize_state,
    run,
    stochastic_weights,
)

contrib: Any = optax.contrib
is_old = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="earlier compilers keep gradients that were scaled"
)


# With sums over leaves: of gradients, of updates, of both in one after the other; and conditions.
SUMMED: dict[str, Any] = {
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "clipped after": optax.chain(optax.adamw(1e-3), optax.clip_by_global_norm(0.1)),
    "lamb": optax.lamb(1e-2),
    "novograd": optax.novograd(1e-2),
}


def temporaries(tx: Any, shapes: Any, dtype: Any = jnp.float32) -> tuple[float, int]:
    """Bytes per parameter besides gradients, of the donated step, and its parameters."""
    number = sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def step(params: Any, state: Any, x: Any) -> Any:
        g = jax.tree.map(lambda p: (jnp.sin(p.astype(jnp.float32)) * x).astype(dtype), params)
        return op.apply(tx, params, state, jax.lax.optimization_barrier(g))

    state = jax.eval_shape(tx.init, shapes)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, state, 1.0)
    memory: Any = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes / number - jnp.dtype(dtype).itemsize, number


def matrices(number: int, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    return {f"w{i}": jax.ShapeDtypeStruct((1024, 512), dtype) for i in range(number)}


@is_old
@pytest.mark.sample(1)
@pytest.mark.parametrize("grad", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("name", ["adamw", *SUMMED])
def test_temporaries_are_those_of_a_piece(name: str, codec: op.Codec, grad: Any) -> None:
    shapes, number = matrices(4), 4 * 1024 * 512
    chunk = number * 4 // 64
    inner = SUMMED.get(name, optax.adamw(1e-3))
    tx = stochastic_weights(quantize_state(inner, codec, chunk_bytes=chunk))
    if name == "novograd":
        grad = jnp.float32  # sums inside of conditions are made whole, of float32
    found, _ = temporaries(tx, shapes, grad)
    # XLA for CPUs sums the squares of gradients in bfloat16 as an array of float32.
    is_summed = name != "adamw" and grad == jnp.bfloat16
    assert found <= (4 if is_summed else 1.5) + 2 * chunk / number
    assert not op.explain_precision(tx, shapes).whole


@is_old
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["even", "odd", "small"])
@pytest.mark.parametrize(
    "codec", [*CODECS.values(), op.dynamic8(block=4096)], ids=[*CODECS, "4096"]
)
def test_temporaries_are_at_most_what_is_said(codec: op.Codec, name: str) -> None:
    shapes: Any = {"even": [(1024, 512)] * 2, "odd": [(509, 1000)], "small": [(64, 64)] * 50}
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes[name]]
    grads = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in like]
    for chunk in (1 << 14, 1 << 10):
        tx = master_weights(quantize_state(optax.adamw(1e-3), codec, chunk_bytes=chunk))
        step = jax.jit(tx.apply, donate_argnums=(0, 1))
        compiled: Any = step.lower(like, jax.eval_shape(tx.init, like), grads).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= tx.temporary_bytes(like)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_no_block_costs_a_conversion_of_the_array(codec: op.Codec) -> None:
    like = [jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)]
    grads = [jax.ShapeDtypeStruct((1024, 512), jnp.float32)]
    tx = stochastic_weights(quantize_state(optax.adamw(1e-3), codec, chunk_bytes=1 << 14))
    step = jax.jit(tx.apply, donate_argnums=(0, 1))
    text = step.lower(like, jax.eval_shape(tx.init, like), grads).compile().as_text() or ""
    assert "while" in text
    assert not re.findall(r"= (?:f8\w+|f16)\[1024,512\]\S* convert\(", text)


@is_old
@pytest.mark.slow
@pytest.mark.parametrize("key", [0, jax.random.key(0)], ids=["raw", "typed"])
def test_noise_of_one_of_the_leaves_is_there_at_once(key: Any) -> None:
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key), optax.adamw(1e-3))
    tx = stochastic_weights(quantize_state(noisy, op.dynamic8(), chunk_bytes=1024 * 512 // 4))
    found, _ = temporaries(tx, matrices(8))
    assert found <= 1.5 + 4 * 8 / 8  # of one leaf: decoded, its noise, and what is encoded
    assert len(op.explain_precision(tx, matrices(8)).whole or ()) == 8


SHAPES = {
    "flat": (16384,),
    "long": (32, 512),
    "odd": (96, 250),
    "tall": (96, 256),
}


def start(dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    rows = zip(keys, SHAPES.items(), strict=True)
    return {
        name: (0.02 * jax.random.normal(key, shape)).astype(dtype) for key, (name, shape) in rows
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMED)
def test_pieces_have_the_sums_of_the_whole(name: str) -> None:
    exact: Any = {name: p.astype(jnp.float32) for name, p in start().items()}
    exact, _ = run(SUMMED[name], exact)
    inner = quantize_state(SUMMED[name], op.identity(), chunk_bytes=20_000)
    params, state = run(master_weights(inner, storage="f32"), start())
    found = op.master_of(state, params)
    for one, other in zip(*map(jax.tree.leaves, (found, exact)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-7)


# Products by powers of two: compilers may join others with a sum (FMA), in one program and not in
# another.
EXACT_ADAMW = optax.adamw(2.0**-10, b1=0.5, b2=0.5, weight_decay=2.0**-4)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_shapes_that_are_compiled_together_have_the_bits_of_each(codec: op.Codec) -> None:
    found = [
        bits(run(stochastic_weights(quantize_state(EXACT_ADAMW, codec, **size)), start()))
        for size in ({}, {"chunk_bytes": 20_000})
    ]
    assert found[0] == found[1]
