"""What wrapping costs: trace time and dispatch of a wrapped AdamW step against raw Optax's.

    hatch run dev:python tools/bench/wrapped_step.py --leaves 1000

Rows are ratios to the raw step, the median over rounds in which every variant runs once, in turn,
in this process. Beside the wrapped step: the run-time learning rate, against Optax's own way to
have one (`inject_hyperparams`), and reading the rate that a schedule gives.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax

SCHEDULE = optax.cosine_decay_schedule(1e-3, 1000)
Step = Callable[..., Any]


def raw_step(params: Any, state: Any, grads: Any) -> Any:
    """One step of raw Optax."""
    updates, state = optax.adamw(SCHEDULE).update(grads, state, params)
    return optax.apply_updates(params, updates), state


def injected_step(params: Any, state: Any, grads: Any, rate: Any) -> Any:
    """One step with the rate in the state, as `inject_hyperparams` wants it."""
    state = state._replace(hyperparams={**state.hyperparams, "learning_rate": rate})
    updates, state = optax.inject_hyperparams(optax.adamw)(1e-3).update(grads, state, params)
    return optax.apply_updates(params, updates), state


def variants(leaves: int) -> dict[str, tuple[Step, tuple[Any, ...]]]:
    """Returns function and operands of every variant; the first is what the others are held to."""
    params = {f"w{i}": jnp.ones((8, 8)) for i in range(leaves)}
    optimizer = opt.adamw(SCHEDULE).create(params)
    injected = optax.inject_hyperparams(optax.adamw)(1e-3).init(params)
    rate = jnp.float32(1e-3)
    return {
        "raw optax": (raw_step, (params, optax.adamw(SCHEDULE).init(params), params)),
        "wrapped": (lambda o, g: o.apply_gradient(g), (optimizer, params)),
        "inject_hyperparams": (injected_step, (params, injected, params, rate)),
        "wrapped, learning_rate=": (
            lambda o, g, r: o.apply_gradient(g, learning_rate=r),
            (optimizer, params, rate),
        ),
        "wrapped + resolve_hyper_params": (
            lambda o, g: (o.apply_gradient(g), opt.resolve_hyper_params(o)),
            (optimizer, params),
        ),
    }


def seconds(function: Callable[[], Any]) -> float:
    """Returns how long one call takes."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def trace(step: Step, operands: tuple[Any, ...]) -> None:
    """Traces a step anew: a function that `jit` knows would not be."""
    jax.jit(lambda *args: step(*args)).trace(*operands)


def compare(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Returns the median ratio of each call's time to the first one's."""
    for call in calls.values():
        call()
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    first = next(iter(calls))
    return {name: statistics.median(t[name] / t[first] for t in times) for name in calls}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=500, help="parameters, of 8 x 8 floats each")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()

    table = variants(options.leaves)
    traces = {name: functools.partial(trace, *variant) for name, variant in table.items()}
    calls = {
        name: functools.partial(jax.jit(f), *operands) for name, (f, operands) in table.items()
    }
    print(f"{options.leaves} leaves, jax {jax.__version__}, optax {optax.__version__}")
    traced, called = compare(traces, options.rounds), compare(calls, 10 * options.rounds)
    print(f"{'ratio to raw optax':32} {'trace':>7} {'call':>7}")
    for name in table:
        print(f"{name:32} {traced[name]:7.2f} {called[name]:7.2f}")


if __name__ == "__main__":
    main()
