"""What groups cost: a `MultiOptimizer` of wrapped Optax optimizers against `optax.partition`.

    hatch run dev:python tools/bench/multi_optimizer.py --leaves 2000 --groups 4

Rows are ratios to `optax.partition`, the median over rounds in which every variant runs once, in
turn, in this process: tracing the step (processor time), tracing it the first time (when the
patterns are matched against the paths), calling it compiled, and bytes accessed as XLA counts them.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from opt_core import MultiOptimizer

Step = Callable[..., Any]


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


def variants(leaves: int, groups: int) -> dict[str, tuple[Step, tuple[Any, ...]]]:
    """Returns function and operands of every variant; the first is what the others are held to."""
    params = make_params(leaves, groups)
    partition = make_partition(params, groups)

    def partition_step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = partition.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    optimizer = make_definition(groups).create(params)

    def first_step(grads: Any) -> Any:
        new = optimizer.replace(optimizer_def=make_definition(groups))
        return new.apply_gradient(grads)

    return {
        "optax.partition": (partition_step, (params, partition.init(params), params)),
        "MultiOptimizer": (lambda o, g: o.apply_gradient(g), (optimizer, params)),
        "MultiOptimizer, built anew": (first_step, (params,)),
    }


def seconds(function: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Returns how long one call takes."""
    start = clock()
    jax.block_until_ready(function())
    return clock() - start


def trace(step: Step, operands: tuple[Any, ...]) -> None:
    """Traces a step anew: a function that `jit` knows would not be."""
    jax.jit(lambda *args: step(*args)).trace(*operands)


def compare(
    calls: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Returns the median ratio of each call's time to the first one's."""
    for call in calls.values():
        call()
    times = [{name: seconds(call, clock) for name, call in calls.items()} for _ in range(rounds)]
    first = next(iter(calls))
    return {name: statistics.median(t[name] / t[first] for t in times) for name in calls}


def bytes_accessed(step: Step, operands: tuple[Any, ...]) -> float:
    """Returns XLA's count for the compiled step."""
    cost: Any = jax.jit(step).lower(*operands).compile().cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return float(cost["bytes accessed"])


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=2000, help="parameters, of 8 x 8 floats each")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-compile", action="store_true", help="only trace")
    options = parser.parse_args()

    table = variants(options.leaves, options.groups)
    print(f"{options.leaves} leaves, {options.groups} groups, jax {jax.__version__}")
    traces = {name: functools.partial(trace, *variant) for name, variant in table.items()}
    for name, ratio in compare(traces, options.rounds, time.process_time).items():
        print(f"trace   {name:28} {ratio:6.2f}")
    if options.no_compile:
        return
    calls = {
        name: functools.partial(jax.jit(table[name][0]), *table[name][1])
        for name in list(table)[:2]
    }
    for name, ratio in compare(calls, 10 * options.rounds, time.perf_counter).items():
        print(f"call    {name:28} {ratio:6.2f}")
    costs = {name: bytes_accessed(*table[name]) for name in calls}
    for name, cost in costs.items():
        print(f"bytes   {name:28} {cost / costs['optax.partition']:6.2f}")


if __name__ == "__main__":
    main()
