"""What describing a state costs: the first call, and the second, which finds it again.

Both are ratios to flattening the optimizer, which any answer about all leaves needs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from opt_core import OptimizerDef, describe_state

DEFINITIONS: dict[str, Callable[[], OptimizerDef]] = {
    "adamw": lambda: opt.adamw(1e-3),
    "adafactor": lambda: opt.adafactor(1e-3),
    "MultiSteps": lambda: opt.OptaxWrapper(optax.MultiSteps(optax.adamw(1e-3), 4)),
}


def seconds(function: Callable[[], Any]) -> float:
    """Seconds of processor time that one call takes."""
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    """Prints one row per definition."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    params = {f"layer_{i}": jnp.ones((2, 3)) for i in range(arguments.params)}
    print(f"{'':12}{'leaves':>8}{'first s':>9}{'second ms':>11}{'flatten ms':>12}{'ratio':>7}")
    for name, make in DEFINITIONS.items():
        optimizer = make().create(params)
        describe = functools.partial(describe_state, optimizer)
        flatten = functools.partial(jax.tree.flatten, optimizer)
        first = seconds(describe)
        pairs = [(seconds(describe), seconds(flatten)) for _ in range(arguments.rounds)]
        second, flat = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        leaves = len(jax.tree.leaves(optimizer.state.param_states))
        print(
            f"{name:12}{leaves:8,}{first:9.2f}{second:11.2f}{flat:12.2f}{second / flat:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
