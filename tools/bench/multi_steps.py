r"""What accumulating with `MultiSteps` costs, beside Optax's and beside the least it could cost.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 \
        hatch run dev:python tools/bench/multi_steps.py --leaves 8 --side 1024

The two variables keep the heap between calls, as an accelerator's allocator does: without them a
large temporary costs page faults, and the times are those of the kernel. Every variant owns its
parameters and state and donates them. A round times each once, in turn, in this process; printed
are medians over rounds of ratios within a round.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from opt_accumulate._multi_steps import MultiSteps

K = 4
INNER = optax.adamw(1e-3)
Step = Callable[[Any, Any, Any], tuple[Any, Any]]
Times = dict[str, tuple[float, float]]


def accumulate(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """The bare accumulation; the state is the accumulator and a counter."""
    acc, count = state
    acc = jax.tree.map(lambda a, g: a + (g - a) / (count + 1), acc, grads)
    return params, (acc, (count + 1) % K)


def adamw(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """One step of the inner optimizer."""
    updates, state = INNER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def applied(update: Callable[..., Any]) -> Step:
    """A step of Optax's protocol: updates, zeros or not, are added to the parameters."""

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def variants(params: Any) -> dict[str, tuple[Step, Any]]:
    """Returns step and first state of each variant; the first two are the yardsticks."""
    theirs = optax.MultiSteps(INNER, K)
    loop, cond, select = (MultiSteps(INNER, K, form=f) for f in ("loop", "cond", "select"))
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {
        "accumulate": (accumulate, (zeros, jnp.int32(0))),
        "adamw": (adamw, INNER.init(params)),
        "apply": (loop.apply, loop.init(params)),
        "apply, cond": (cond.apply, cond.init(params)),
        "apply, select": (select.apply, select.init(params)),
        "update": (applied(loop.update), loop.init(params)),
        "optax": (applied(theirs.update), theirs.init(params)),
    }


class Runner:
    """One variant, compiled, with the parameters and state that it donates to itself."""

    def __init__(self, step: Step, params: Any, state: Any) -> None:
        self.carried = jax.tree.map(jnp.copy, (params, state))
        jitted = jax.jit(step, donate_argnums=(0, 1))
        self.compiled = jitted.lower(*self.carried, params).compile()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        memory: Any = self.compiled.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes / size

    def seconds(self, grads: Any) -> float:
        """Returns how long one step takes."""
        start = time.perf_counter()
        self.carried = jax.block_until_ready(self.compiled(*self.carried, grads))
        return time.perf_counter() - start


def rounds(runners: dict[str, Runner], grads: Any, number: int) -> Iterator[Times]:
    """Yields the times of a non-emitting mini-step, and of a window, of each variant."""
    for _ in range(number):
        times = {}
        for name, runner in runners.items():
            window = [runner.seconds(grads) for _ in range(K)]
            times[name] = statistics.median(window[:-1]), sum(window)
        yield times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=8, help="parameters, square")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    shape = options.side, options.side
    params = {f"w{i}": jnp.full(shape, 0.5) for i in range(options.leaves)}
    runners = {
        name: Runner(step, params, state) for name, (step, state) in variants(params).items()
    }
    measured = list(rounds(runners, params, options.rounds + 1))[1:]
    print(f"{options.leaves} leaves of {shape}, window of {K}, {options.rounds} rounds,")
    print(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'':16} {'mini-step /':>14} {'window / (4':>16} {'temporaries':>12}")
    print(f"{'':16} {'accumulation':>14} {'acc. + 1 adamw)':>16} {'/ params':>12}")
    for name, runner in runners.items():
        step = statistics.median(t[name][0] / t["accumulate"][0] for t in measured)
        least = [t["accumulate"][1] + t["adamw"][1] / K for t in measured]
        window = statistics.median(t[name][1] / a for t, a in zip(measured, least, strict=True))
        print(f"{name:16} {step:14.2f} {window:16.2f} {runner.temporaries:12.2f}")


if __name__ == "__main__":
    main()
