"""Low-precision AdamW beside plain Optax: bytes, temporaries, seconds to run and to compile.

    hatch run dev:python tools/bench/precision.py --leaves 4 --side 1024

Temporaries are those of the compiled, donated step with gradients made inside it, less the
gradients; `chunk_bytes` is 1/64 of the float32 parameters. Compiling is tracing, lowering and
compiling: of the update alone, for many leaves and with the default `chunk_bytes`, and of a step of
a decoder with as many leaves in five shapes.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import opt_precision as op
import optax
from _common import Figure, Row, counted, interleave, main, timed

PEER = "adamw, float32"
# Of each: the limit of bytes of parameters and state, beside the 12 of float32.
CASES = {
    "stochastic, bfloat16": 6.001 / 12,
    "stochastic, dynamic8": 4.04 / 12,
    "stochastic, log8": 4.04 / 12,
    "stochastic, float8": 4.04 / 12,
    "kahan, dynamic8": 6.04 / 12,
    "remainder, dynamic8": 6.04 / 12,
}
FIGURES = {
    **{f"bytes, {name}": Figure(PEER, limit, "B") for name, limit in CASES.items()},
    **{f"temporaries, {name}": Figure("parameters", 1.55, "B") for name in CASES},
    **{f"step, {name}": Figure(PEER) for name in CASES},
    "temporaries, many leaves": Figure("parameters", 1.55, "B"),
    "compile, update of many leaves": Figure(PEER),
    "compile, step of a decoder": Figure(PEER, 1.5),
}
# Of the figures about compiling: float32 parameters, so that models are alike.
COMPILED = "float32, dynamic8"


def transformation(name: str, chunk_bytes: int = 64 << 20) -> Any:
    """The transformation of a case."""
    weights, codec = name.split(", ")
    made: Any = getattr(op, codec)()
    inner = op.quantize_state(optax.adamw(1e-3), made, chunk_bytes=chunk_bytes)
    if weights == "float32":
        return inner
    if weights == "stochastic":
        return op.stochastic_weights(inner)
    storage: Any = weights
    return op.master_weights(inner, storage=storage)


class Run:
    """One compiled step with its parameters and state."""

    def __init__(self, tx: Any, dtype: Any, leaves: int, side: int) -> None:
        keys = jax.random.split(jax.random.key(0), leaves)
        self.params: Any = [0.02 * jax.random.normal(key, (side, side), dtype) for key in keys]
        self.state = tx.init(self.params)

        def step(params: Any, state: Any, x: Any) -> Any:
            grads = [jnp.sin(x * p.astype(jnp.float32)) for p in params]
            return op.apply(tx, params, state, jax.lax.optimization_barrier(grads))

        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, 1.0)
        self._step: Any = lowered.compile()
        number = leaves * side * side
        self.bytes = sum(x.nbytes for x in jax.tree.leaves((self.params, self.state))) / number
        memory: Any = self._step.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes / number - 4

    def once(self) -> Any:
        """Makes a step."""
        self.params, self.state = self._step(self.params, self.state, 1.0)
        return self.params


def compile_update(tx: Any, leaves: int) -> Callable[[], None]:
    """Returns what compiles the update of `leaves` matrices of 64 x 64."""
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * leaves
    state = jax.eval_shape(tx.init, params)

    def run() -> None:
        jax.clear_caches()
        step = jax.jit(lambda *args: op.apply(tx, *args), donate_argnums=(0, 1))
        step.lower(params, state, params).compile()

    return run


def compile_decoder(tx: Any, leaves: int) -> Callable[[], None]:
    """Returns what compiles a training step of a decoder with about that many leaves."""
    width, words = 256, 512
    shapes = {
        **dict.fromkeys(("query", "key", "value", "out"), (width, width)),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "n1": (width,),
        "n2": (width,),
    }
    layer = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params = {
        "layers": [layer] * (leaves // len(layer)),
        "embed": jax.ShapeDtypeStruct((words, width), jnp.float32),
        "head": jax.ShapeDtypeStruct((width, words), jnp.float32),
    }
    state, tokens = jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((4, 64), jnp.int32)

    def normal(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * (1 + scale)

    def attention(p: Any, x: Any) -> Any:
        heads = [(x @ p[name]).reshape(*x.shape[:2], 4, -1) for name in ("query", "key", "value")]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        return mixed.reshape(x.shape) @ p["out"]

    def loss(params: Any, tokens: Any) -> Any:
        x = params["embed"][tokens]
        for p in params["layers"]:
            x = x + attention(p, normal(x, p["n1"]))
            x = x + jax.nn.gelu(normal(x, p["n2"]) @ p["up"]) @ p["down"]
        each = optax.softmax_cross_entropy_with_integer_labels
        return each((x @ params["head"])[:, :-1], tokens[:, 1:]).mean()

    def step(params: Any, state: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return value, op.apply(tx, params, state, grads)

    def run() -> None:
        jax.clear_caches()
        jax.jit(step, donate_argnums=(0, 1)).lower(params, state, tokens).compile()

    return run


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--leaves", type=int, default=4, help="parameters, square")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--many", type=int, default=100, help="leaves that are compiled")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    side = 512 if options.quick else options.side
    chunk_bytes = 4 * options.leaves * side**2 // 64
    plain = Run(optax.adamw(1e-3), jnp.float32, options.leaves, side)
    runs = {
        name: Run(transformation(name, chunk_bytes), jnp.bfloat16, options.leaves, side)
        for name in CASES
    }
    times = interleave(
        {PEER: plain.once, **{name: run.once for name, run in runs.items()}},
        rounds=3 if options.quick else 11,
    )
    for name, run in runs.items():
        yield counted(f"bytes, {name}", run.bytes, plain.bytes)
        yield counted(f"temporaries, {name}", run.temporaries, 1.0)
        yield timed(f"step, {name}", times[name], times[PEER])
    many = 24 if options.quick else options.many
    chunk_bytes = 4 * many * 64**2 // 64
    small = Run(transformation("stochastic, dynamic8", chunk_bytes), jnp.bfloat16, many, 64)
    yield counted("temporaries, many leaves", small.temporaries, 1.0, size=many)
    for name, compiled in (
        ("update of many leaves", compile_update),
        ("step of a decoder", compile_decoder),
    ):
        seconds = interleave(
            {
                PEER: compiled(optax.adamw(1e-3), many),
                COMPILED: compiled(transformation(COMPILED), many),
            },
            rounds=1 if options.quick else 5,
        )
        yield timed(f"compile, {name}", seconds[COMPILED], seconds[PEER], size=many)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
