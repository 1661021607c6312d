"""Low-precision AdamW beside plain Optax: bytes, temporaries, seconds to run and to compile.

    hatch run dev:bench --only precision

Temporaries are bytes a parameter of the compiled, donated step with gradients made inside it, less
the gradients; `chunk_bytes` is 1/64 of the float32 parameters. Compiling is tracing, lowering and
compiling, with the default `chunk_bytes`: of the update alone, and of a step of the decoder of
`examples/lm` with about as many leaves.
"""

import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import opt_precision as op
import optax
from _common import Counts, Row, Runner, counted, interleave, on_accelerator, timed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from lm.model import Transformer, next_byte_loss
from lm.sizes import ModelConfig

PEER = "AdamW, float32"
# Of each: the limit of bytes a parameter of parameters and state.
CASES = {
    "stochastic, bfloat16": 6.001,
    "stochastic, dynamic8": 4.04,
    "stochastic, log8": 4.04,
    "stochastic, float8": 4.04,
    "kahan, dynamic8": 6.04,
    "remainder, dynamic8": 6.04,
    "remainder8, dynamic8": 5.04,
}


def transformation(name: str, chunk_bytes: int = 64 << 20) -> Any:
    """The transformation of a case."""
    weights, codec = name.split(", ")
    made: Any = getattr(op, codec)()
    inner = op.quantize_state(optax.adamw(1e-3), made, chunk_bytes=chunk_bytes)
    if weights == "float32":
        return inner
    storage: Any = weights
    stochastic = weights == "stochastic"
    return op.stochastic_weights(inner) if stochastic else op.master_weights(inner, storage=storage)


def run(tx: Any, dtype: Any, leaves: int, side: int) -> Runner:
    """Returns a step with gradients that are made inside."""
    keys = jax.random.split(jax.random.key(0), leaves)
    params = [0.02 * jax.random.normal(key, (side, side), dtype) for key in keys]

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = [jnp.sin(x * p.astype(jnp.float32)) for p in params]
        return op.apply(tx, params, state, jax.lax.optimization_barrier(grads))

    return Runner(step, params, tx.init(params), 1.0)


def compile_update(tx: Any, leaves: int) -> None:
    """Compiles the update of `leaves` matrices of 64 x 64."""
    jax.clear_caches()
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * leaves
    step = jax.jit(lambda *args: op.apply(tx, *args), donate_argnums=(0, 1))
    step.lower(params, jax.eval_shape(tx.init, params), params).compile()


def compile_decoder(tx: Any, leaves: int) -> None:
    """Compiles a training step of a decoder with about that many leaves."""
    jax.clear_caches()
    model = Transformer(ModelConfig(layers=leaves // 6, d_model=256, heads=4, d_ff=1024))
    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    params = flax.core.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens))["params"]

    def step(params: Any, state: Any, tokens: Any) -> Any:
        grads = jax.grad(lambda p: next_byte_loss(model, p, tokens).mean())(params)
        return op.apply(tx, params, state, grads)

    state = jax.eval_shape(tx.init, params)
    jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows."""
    leaves, many = 4, 24 if quick else 100
    side = 512 if quick else 8192 if on_accelerator() else 1024
    number = leaves * side**2
    runs = {PEER: run(optax.adamw(1e-3), jnp.float32, leaves, side)}
    for name in CASES:
        tx = transformation(name, 4 * number // 64)
        runs[name] = run(tx, jnp.bfloat16, leaves, side)
    times = interleave(runs, 3 if quick else 11)
    for name, limit in CASES.items():
        held = sum(x.nbytes for x in jax.tree.leaves(runs[name].carried)) / number
        yield counted(f"bytes a parameter, {name}", held, PEER, 12, limit=limit / 12)
        spare = Counts(runs[name].compiled).temporaries / number - 4
        yield counted(f"temporaries, {name}", spare, "a byte a parameter", 1, limit=1.55)
        yield timed(f"step, {name}", times[name], PEER, times[PEER])
    tx = transformation("stochastic, dynamic8", 4 * many * 64**2 // 64)
    small = Counts(run(tx, jnp.bfloat16, many, 64).compiled).temporaries / (many * 64**2) - 4
    yield counted("temporaries", small, "a byte a parameter", 1, limit=1.55, size=many)
    low = transformation("float32, dynamic8")  # float32 parameters, so that models are alike
    for name, compiled, most in (
        ("compile, update", compile_update, None),
        ("compile, step of a decoder", compile_decoder, 1.5),
    ):
        calls = {
            PEER: functools.partial(compiled, optax.adamw(1e-3), many),
            "ours": functools.partial(compiled, low, many),
        }
        found = interleave(calls, 1 if quick else 5, clock=time.process_time)
        yield timed(name, found["ours"], PEER, found[PEER], limit=most, size=many)
