"""Small problems that the tests share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op

# Optax types what `init` returns as a tree of arrays, which no state is.
quantize_state: Any = op.quantize_state
stochastic_weights: Any = op.stochastic_weights
master_weights: Any = op.master_weights
by_field: Any = op.by_field

WEIGHTS: dict[str, Any] = {
    "stochastic": stochastic_weights,
    "f32": master_weights,
    "remainder": functools.partial(master_weights, storage="remainder"),
    "remainder8": functools.partial(master_weights, storage="remainder8"),
    "kahan": functools.partial(master_weights, storage="kahan"),
}
EIGHT_BITS = {"dynamic8": op.dynamic8(), "float8": op.float8(), "log8": op.log8()}
CODECS = {"bfloat16": op.bfloat16(), **EIGHT_BITS}


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
    key = jax.random.key(0)
    return {
        "bias": jnp.zeros(8192, dtype),
        "kernel": (0.02 * jax.random.normal(key, (96, 256))).astype(dtype),
        "scale": jnp.ones((), dtype),
    }


def grads(step: int, like: Any) -> Any:
    leaves, tree = jax.tree.flatten(like)
    rng = np.random.default_rng(step)
    return jax.tree.unflatten(
        tree, [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in leaves]
    )


def run(tx: Any, start: Any, steps: int = 3, *, compiled: bool = True) -> tuple[Any, Any]:
    """Parameters and state after some steps."""

    def apply(params: Any, state: Any, g: Any) -> tuple[Any, Any]:
        return op.apply(tx, params, state, g)

    state, step = tx.init(start), jax.jit(apply) if compiled else apply
    for number in range(steps):
        start, state = step(start, state, grads(number, start))
    return start, state


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)
