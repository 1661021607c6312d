"""What `verify` costs, held against compiling the step that it reads.

    hatch run dev:python tools/bench/verify.py --layers 4 32

A decoder's blocks under ZeRO-1 AdamW, on eight devices; on a CPU they are virtual.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _common import Figure, Row, counted, main, no_garbage, timed
from jax.sharding import NamedSharding, PartitionSpec
from opt_partition import Expected, verify
from tqdm import tqdm

FIGURES = {"verify": Figure("compile", 0.1), "collectives": Figure("one a leaf", None, "")}
SIZES = {"wi": (64, 256), "wo": (256, 64), "query": (64, 64), "scale": (64,)}


def lower(layers: int) -> tuple[Callable[[], Any], Expected]:
    """Returns a function that lowers the step, and its expected sharding."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    whole, divided = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    tx = optax.adamw(1e-3)
    shapes = {
        f"layer_{i}": {n: jax.ShapeDtypeStruct(s, "float32") for n, s in SIZES.items()}
        for i in range(layers)
    }
    state = jax.eval_shape(tx.init, shapes)
    in_params = jax.tree.map(lambda _: whole, shapes)
    in_state = jax.tree.map(lambda x: divided if x.shape else whole, state)

    def loss(params: Any, batch: Any) -> Any:
        for layer in params.values():
            x = batch * layer["scale"]
            batch = (
                batch + jnp.tanh(x @ layer["query"]) + jax.nn.relu(x @ layer["wi"]) @ layer["wo"]
            )
        return jnp.mean(batch**2)

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def lowered() -> Any:
        jitted = jax.jit(
            lambda *args: step(*args),
            in_shardings=(in_params, in_state, divided),
            out_shardings=(in_params, in_state),
            donate_argnums=(0, 1),
        )
        return jitted.lower(shapes, state, jax.ShapeDtypeStruct((64, 64), "float32"))

    expected = Expected(inputs=(in_params, in_state), outputs=(in_params, in_state))
    return lowered, expected


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--layers", type=int, nargs="+", help="of four parameters")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of every size."""
    for layers in options.layers or ([4] if options.quick else [4, 16, 64, 256]):
        lowered, expected = lower(layers)
        verify(lowered(), expected)  # imports and warms up
        compiling, verifying = [], []
        for _ in tqdm(range(options.rounds), leave=False, desc=f"{layers} layers", disable=None):
            program = lowered()
            with no_garbage():
                start = time.process_time()
                compiled = program.compile()
                middle = time.process_time()
                report = verify(compiled, expected)
                compiling.append(middle - start)
                verifying.append(time.process_time() - middle)
        leaves = 4 * layers
        yield timed("verify", verifying, compiling, size=leaves)
        yield counted("collectives", len(report.collectives), leaves, size=leaves)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments, devices=8)
