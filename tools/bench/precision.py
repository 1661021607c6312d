"""Low-precision AdamW beside plain Optax: bytes, temporaries, seconds to run and to compile.

    hatch run dev:python tools/bench/precision.py --leaves 4 --side 1024

Temporaries are those of the compiled, donated step with gradients made inside it, less the
gradients; `chunk_bytes` is 1/64 of the float32 parameters.
"""

import argparse
import time
from collections.abc import Iterator
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
    **{f"compile, {name}": Figure(PEER) for name in CASES},
}


def transformation(name: str, chunk_bytes: int) -> Any:
    """The transformation of a case."""
    weights, codec = name.split(", ")
    made: Any = getattr(op, codec)()
    inner = op.quantize_state(optax.adamw(1e-3), made, chunk_bytes=chunk_bytes)
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
        before = time.process_time()
        self._step: Any = lowered.compile()
        self.compile_seconds = time.process_time() - before
        number = leaves * side * side
        self.bytes = sum(x.nbytes for x in jax.tree.leaves((self.params, self.state))) / number
        memory: Any = self._step.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes / number - 4

    def once(self) -> Any:
        """Makes a step."""
        self.params, self.state = self._step(self.params, self.state, 1.0)
        return self.params


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--leaves", type=int, default=4, help="parameters, square")
    parser.add_argument("--side", type=int, default=1024)


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
        yield timed(f"compile, {name}", [run.compile_seconds], [plain.compile_seconds])


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
