"""What deriving the axes of a state costs, held against evaluating its `init` once for its shapes.

    hatch run dev:python tools/bench/derivation.py --leaves 100 10000

Rows are ratios to `jax.eval_shape(tx.init, params)`, the median over rounds in which both run in
turn in this process, with the seconds of both (processor time, which a busy machine changes least)
and the number of evaluations beside.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
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


def seconds(function: Callable[[], Any]) -> float:
    """Seconds of processor time that one call takes."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(make: Callable[[], Any], leaves: int, rounds: int) -> str:
    """One row: the median ratio, the median seconds of both, and the number of evaluations."""
    params, axes = make_job(leaves)
    pairs, evaluations = [], 0
    for _ in range(rounds):
        tx = make()  # a new one: JAX remembers what it evaluated
        theirs = seconds(functools.partial(jax.eval_shape, lambda p, tx=tx: tx.init(p), params))
        start = time.process_time()
        evaluations = explain(tx, params, axes).evaluations
        pairs.append((time.process_time() - start, theirs))
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    return f"{leaves:8,}{ratio:8.2f}{ours:11.2f}{theirs:9.2f}{evaluations:13}"


def main() -> None:
    """Prints one row per transformation and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'':12}{'leaves':>8}{'ratio':>8}{'explain s':>11}{'init s':>9}{'evaluations':>13}")
    for leaves in arguments.leaves:
        for name, make in TRANSFORMATIONS.items():
            print(f"{name:12}{measure(make, leaves, arguments.rounds)}", flush=True)


if __name__ == "__main__":
    main()
