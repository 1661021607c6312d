"""What describing a state costs: the first call, and the second, which finds it again.

Both are ratios to flattening the optimizer, which any answer about all leaves needs.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from _common import Figure, Row, interleave, main, seconds, timed
from opt_core import OptimizerDef, describe_state

DEFINITIONS: dict[str, Callable[[], OptimizerDef]] = {
    "adamw": lambda: opt.adamw(1e-3),
    "adafactor": lambda: opt.adafactor(1e-3),
    "MultiSteps": lambda: opt.OptaxWrapper(optax.MultiSteps(optax.adamw(1e-3), 4)),
}


FIGURES = {
    f"{call}, {name}": Figure("flatten") for name in DEFINITIONS for call in ("first", "second")
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--params", type=int, help="5000, or 500 with --quick")
    parser.add_argument("--rounds", type=int, default=20)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields two rows per definition."""
    size = options.params or (500 if options.quick else 5_000)
    params = {f"layer_{i}": jnp.ones((2, 3)) for i in range(size)}
    for name, make in DEFINITIONS.items():
        optimizer = make().create(params)
        describe = functools.partial(describe_state, optimizer)
        flatten = functools.partial(jax.tree.flatten, optimizer)
        first = seconds(describe)
        times = interleave({"flatten": flatten, "describe": describe}, options.rounds)
        leaves = len(jax.tree.leaves(optimizer.state.param_states))
        yield timed(f"first, {name}", [first], [min(times["flatten"])], size=leaves)
        yield timed(f"second, {name}", times["describe"], times["flatten"], size=leaves)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
