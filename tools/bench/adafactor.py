"""What Adafactor costs beside `optax.adafactor`: tracing, compiling and one call of a step.

    hatch run dev:python tools/bench/adafactor.py --leaves 300

Rows are ratios to Optax's step, the median over rounds in which every variant runs once, in turn,
in this process. Every round traces and compiles a new function, so that nothing is remembered; that
is measured in CPU time, which other processes disturb less.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import opt_adafactor
import optax

Step = Callable[..., Any]
PHASES = ("trace", "lower", "compile", "all three")


def optax_step(tx: Any) -> Step:
    """One step of a transformation."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def definition_step(optimizer: Any, grads: Any) -> Any:
    """One step of the definition."""
    return optimizer.apply_gradient(grads)


def variants(params: Any) -> dict[str, tuple[Step, tuple[Any, ...]]]:
    """Returns function and operands of every variant; the first is what the others are held to."""
    theirs = optax.adafactor(0.1, min_dim_size_to_factor=8)
    ours = opt_adafactor.adafactor(0.1, min_dim_size_to_factor=8)
    definition = opt_adafactor.Adafactor(0.1, min_dim_size_to_factor=8)
    return {
        "optax.adafactor": (optax_step(theirs), (params, theirs.init(params), params)),
        "opt_adafactor.adafactor": (optax_step(ours), (params, ours.init(params), params)),
        "opt_adafactor.Adafactor": (definition_step, (definition.create(params), params)),
    }


def build(step: Step, operands: tuple[Any, ...]) -> tuple[list[float], Callable[[], Any]]:
    """Returns the CPU time of tracing, lowering, compiling and the three; and the compiled call."""
    times = [time.process_time()]
    traced = jax.jit(lambda *args: step(*args)).trace(*operands)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    phases = [b - a for a, b in itertools.pairwise(times)]
    return [*phases, sum(phases)], functools.partial(compiled, *operands)


def seconds(call: Callable[[], Any]) -> float:
    """Returns how long one call takes."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def show(
    title: str, rounds: Sequence[Mapping[str, Sequence[float]]], columns: Sequence[str]
) -> None:
    """Prints the median over rounds of each ratio to the first variant."""
    first = next(iter(rounds[0]))
    print(f"{title:26}", *(f"{column:>9}" for column in columns))
    for name in rounds[0]:
        ratios = [[a / b for a, b in zip(r[name], r[first], strict=True)] for r in rounds]
        medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
        print(f"{name:26}", *(f"{median:9.2f}" for median in medians))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=300)
    parser.add_argument("--shapes", type=int, default=12, help="how many different ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=1024, help="of 12 square matrices, for calls")
    options = parser.parse_args()

    print(f"jax {jax.__version__}, optax {optax.__version__}, ratios to optax.adafactor")
    params = {f"w{i}": jnp.ones((8 + i % options.shapes, 16)) for i in range(options.leaves)}
    table = variants(params)
    rounds = [
        {name: build(*variant)[0] for name, variant in table.items()}
        for _ in range(options.rounds + 1)
    ]
    show(f"{options.leaves} leaves", rounds[1:], PHASES)  # the first one imports and warms up

    large = {f"w{i}": jnp.ones((options.size, options.size)) for i in range(12)}
    calls = {name: build(*variant)[1] for name, variant in variants(large).items()}
    called = [{name: [seconds(c)] for name, c in calls.items()} for _ in range(30)]
    show(f"12 of {options.size} x {options.size}", called[3:], ["call"])


if __name__ == "__main__":
    main()
