"""What groups cost: a `MultiOptimizer` of wrapped Optax optimizers against `optax.partition`.

    hatch run dev:python tools/bench/multi_optimizer.py --leaves 2000 --groups 4

Tracing the step, tracing it the first time (when the patterns are matched against the paths),
calling it compiled, and bytes accessed as XLA counts them.
"""

import argparse
import functools
import time
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from _common import (
    Figure,
    Row,
    Variant,
    counted,
    counts,
    interleave,
    main,
    optax_step,
    timed,
    trace,
)
from opt_core import MultiOptimizer

OPTAX = "optax.partition"
FIGURES = {
    "trace": Figure(OPTAX, 1.0),
    "trace, first": Figure(OPTAX),
    "call": Figure(OPTAX, 1.02),
    "bytes accessed": Figure(OPTAX, 1.001, "B"),
}


def make_params(leaves: int, groups: int) -> Any:
    """Returns layers with a leaf per group."""
    return {
        f"layer_{i}": {f"kind_{j}": jnp.ones((8, 8)) for j in range(groups)}
        for i in range(leaves // groups)
    }


def make_definition(groups: int) -> MultiOptimizer:
    """Returns a definition with an AdamW per group."""
    rules = [(f".*/kind_{j}", opt.adamw(1e-3 / (j + 1))) for j in range(groups)]
    return MultiOptimizer.from_rules(rules)


def make_partition(params: Any, groups: int) -> Any:
    """Returns Optax's own."""
    labels = {name: {kind: kind for kind in layer} for name, layer in params.items()}
    txs: dict[Hashable, Any] = {f"kind_{j}": optax.adamw(1e-3 / (j + 1)) for j in range(groups)}
    return optax.partition(txs, labels)


def variants(leaves: int, groups: int) -> dict[str, Variant]:
    """Returns function and operands of every variant."""
    params = make_params(leaves, groups)
    partition = make_partition(params, groups)
    optimizer = make_definition(groups).create(params)

    def first_step(grads: Any) -> Any:
        new = optimizer.replace(optimizer_def=make_definition(groups))
        return new.apply_gradient(grads)

    return {
        OPTAX: (optax_step(partition), (params, partition.init(params), params)),
        "trace": (lambda o, g: o.apply_gradient(g), (optimizer, params)),
        "trace, first": (first_step, (params,)),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, nargs="+", help="parameters, of 8 x 8 floats each")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of every size."""
    rounds = options.rounds
    for leaves in options.leaves or ([100] if options.quick else [100, 1_000]):
        table = variants(leaves, options.groups)
        traces = {name: functools.partial(trace, *variant) for name, variant in table.items()}
        traced = interleave(traces, rounds)
        for name in ("trace", "trace, first"):
            yield timed(name, traced[name], traced[OPTAX], size=leaves)
        steps = {OPTAX: table[OPTAX], "call": table["trace"]}
        calls = {name: functools.partial(jax.jit(f), *args) for name, (f, args) in steps.items()}
        called = interleave(calls, 15 * rounds, clock=time.thread_time)
        yield timed("call", called["call"], called[OPTAX], size=leaves)
        found = {
            name: counts(jax.jit(f).lower(*args).compile()) for name, (f, args) in steps.items()
        }
        ours, theirs = (found[name].bytes_accessed for name in ("call", OPTAX))
        yield counted("bytes accessed", ours, theirs, size=leaves, note=found["call"].misleading)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
