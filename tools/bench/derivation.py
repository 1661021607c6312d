"""What deriving the axes of a state costs, held against evaluating its `init` once for its shapes.

    hatch run dev:python tools/bench/derivation.py --leaves 100 10000

The notes say how often `init` was evaluated.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _common import Figure, Row, main, seconds, timed
from opt_partition import explain

# A layer of eight: matrices, one of them square, stacked ones, vectors and a scalar.
LAYER: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "wi": ((256, 384), ("embed", "mlp")),
    "bi": ((384,), ("mlp",)),
    "query": ((256, 256), ("embed", "heads")),
    "stacked": ((6, 160, 176), ("layers", "embed", "mlp")),
    "scale": ((24,), ("embed",)),
    "in": ((512, 128), ("vocab", "embed")),
    "out": ((128, 512), ("embed", "vocab")),
    "gate": ((), ()),
}


def preconditioners() -> Any:
    """Two matrices for each matrix, and a momentum, in lists in the order of the parameters."""

    def init(params: Any) -> Any:
        leaves = jax.tree.leaves(params)
        matrices = [p for p in leaves if len(p.shape) == 2]
        return {
            "left": [jnp.zeros((p.shape[0], p.shape[0])) for p in matrices],
            "right": [jnp.zeros((p.shape[1], p.shape[1])) for p in matrices],
            "momentum": [jnp.zeros(p.shape) for p in leaves],
        }

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def label(params: Any) -> Any:
    """The group of every parameter: matrices by Adafactor, the rest by Adam."""
    return jax.tree.map(lambda p: "adafactor" if len(p.shape) > 1 else "adam", params)


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "sm3": lambda: optax.sm3(1e-3),
    "lbfgs": optax.scale_by_lbfgs,
    "partition": lambda: optax.partition(
        {"adam": optax.adam(1e-3), "adafactor": optax.adafactor(1e-3)}, label
    ),
    "flat order": preconditioners,
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-3), 4),
}


def make_job(leaves: int) -> tuple[Any, Any]:
    """Parameters of that many leaves, and their axes."""
    layers = range(-(-leaves // len(LAYER)))
    params = {
        f"layer_{i}": {n: jax.ShapeDtypeStruct(s, "float32") for n, (s, _) in LAYER.items()}
        for i in layers
    }
    return params, {f"layer_{i}": {n: axes for n, (_, axes) in LAYER.items()} for i in layers}


FIGURES = {name: Figure("eval_shape(init)") for name in TRANSFORMATIONS}
LARGEST, MANY = ("adamw", "adafactor"), 10_000  # only these with more leaves than that


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=3)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields one row per transformation and size."""
    sizes = [100] if options.quick else [100, 1_000, 10_000, 100_000]
    for leaves in options.leaves or sizes:
        for name, make in TRANSFORMATIONS.items():
            if leaves <= MANY or name in LARGEST:
                yield measure_one(name, make, leaves, options.rounds)


def measure_one(name: str, make: Callable[[], Any], leaves: int, rounds: int) -> Row:
    """Returns one row. Each round has a new transformation: JAX remembers what it evaluated."""
    params, axes = make_job(leaves)
    evaluations = set()

    def init(tx: Any) -> None:
        jax.eval_shape(lambda p: tx.init(p), params)

    def derive(tx: Any) -> None:
        evaluations.add(explain(tx, params, axes).evaluations)

    ours, theirs = [], []
    for tx in [make() for _ in range(rounds)]:
        theirs.append(seconds(functools.partial(init, tx)))
        ours.append(seconds(functools.partial(derive, tx)))
    return timed(name, ours, theirs, size=leaves, note=f"evaluations: {max(evaluations)}")


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
