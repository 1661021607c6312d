"""Cost of accumulation with `MultiSteps`, compared with Optax's and with a lower bound.

    hatch run dev:python tools/bench/multi_steps.py --leaves 8 --side 1024

The heap is kept between calls, as an accelerator's allocator keeps it: otherwise a large temporary
costs page faults, and the times are those of the kernel. Every variant owns its parameters and
state and donates them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _common import Figure, Row, counted, counts, main, optax_step, timed
from opt_accumulate import MultiSteps

K = 4
INNER = optax.adamw(1e-3)
ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
Step = Callable[[Any, Any, Any], tuple[Any, Any]]
Times = dict[str, tuple[float, float]]
BARE, LEAST = "bare accumulation", "4 accumulations, 1 adamw"
# Of each form: the limits of a mini-step that does not emit, of a window, of temporaries.
FORMS: dict[str, tuple[float | None, float | None, float | None]] = {
    "apply": (1.1, 1.1, 0.01),
    "apply, cond": (None, None, None),
    "apply, select": (None, None, None),
    "update": (5.0, 3.0, 1.01),
    "optax": (None, None, None),
}
FIGURES = {
    **{f"mini-step, {form}": Figure(BARE, limits[0]) for form, limits in FORMS.items()},
    **{f"window, {form}": Figure(LEAST, limits[1]) for form, limits in FORMS.items()},
    **{f"temporaries, {form}": Figure("params", limits[2], "B") for form, limits in FORMS.items()},
}


def accumulate(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    """The bare accumulation; the state is the accumulator and a counter."""
    acc, count = state
    acc = jax.tree.map(lambda a, g: a + (g - a) / (count + 1), acc, grads)
    return params, (acc, (count + 1) % K)


def variants(params: Any) -> dict[str, tuple[Step, Any]]:
    """Returns step and first state of each variant; the first two are the peers."""
    theirs = optax.MultiSteps(INNER, K)
    loop, cond, select = (MultiSteps(INNER, K, form=f) for f in ("loop", "cond", "select"))
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {
        "accumulate": (accumulate, (zeros, jnp.int32(0))),
        "adamw": (optax_step(INNER), INNER.init(params)),
        "apply": (loop.apply, loop.init(params)),
        "apply, cond": (cond.apply, cond.init(params)),
        "apply, select": (select.apply, select.init(params)),
        "update": (optax_step(loop), loop.init(params)),
        "optax": (optax_step(theirs), theirs.init(params)),
    }


class Runner:
    """One variant, compiled, with the parameters and state that it donates to itself."""

    def __init__(self, step: Step, params: Any, state: Any) -> None:
        self.carried = jax.tree.map(jnp.copy, (params, state))
        jitted = jax.jit(step, donate_argnums=(0, 1))
        self.compiled = jitted.lower(*self.carried, params).compile()
        self.counts = counts(self.compiled)

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


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, default=8, help="parameters, square")
    parser.add_argument("--side", type=int, help="1024, or 256 with --quick")
    parser.add_argument("--rounds", type=int, default=9)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields three rows of each form."""
    side = options.side or (256 if options.quick else 1024)
    params = {f"w{i}": jnp.full((side, side), 0.5) for i in range(options.leaves)}
    size = sum(leaf.nbytes for leaf in params.values())
    runners = {
        name: Runner(step, params, state) for name, (step, state) in variants(params).items()
    }
    measured = list(rounds(runners, params, options.rounds + 1))[1:]

    def series(name: str, what: int) -> Sequence[float]:
        return [times[name][what] for times in measured]

    least = [a + b / K for a, b in zip(series("accumulate", 1), series("adamw", 1), strict=True)]
    for form in FORMS:
        yield timed(f"mini-step, {form}", series(form, 0), series("accumulate", 0))
        yield timed(f"window, {form}", series(form, 1), least)
        found = runners[form].counts
        yield counted(f"temporaries, {form}", found.temporaries, size, note=found.misleading)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments, environment=ENVIRONMENT)
