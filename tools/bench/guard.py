"""What a step costs that a guard skips, and what an average adds to one that is made.

    hatch run dev:python tools/bench/guard.py --leaves 8 --side 2048

The heap is kept between calls, as an accelerator's allocator keeps it. Every variant owns its
parameters and state and donates them. Bytes are those that the compiled program reads and writes;
of a skipped step without the loop that makes one.
"""

import argparse
import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _common import Figure, Row, counted, interleave, main, timed
from opt_accumulate import guard, with_average

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
AVERAGED = with_average(INNER, 0.999)
GUARDED = guard(AVERAGED)
ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
CLOCK = time.perf_counter
NORM, ADAMW = "norm of the gradients", "adamw, clipped"
FIGURES = {
    "skipped, apply": Figure(NORM, 1.15),
    "skipped, update": Figure(NORM),
    "bytes of a skipped step, apply": Figure(NORM, 1.0, "B"),
    "bytes of a skipped step, update": Figure(NORM, None, "B"),
    "made": Figure(ADAMW, 1.3),
    "average": Figure(ADAMW, 1.3),
    "bytes of an average": Figure("8 a parameter", 1.5, "B"),
}
_LEAST = 1024  # bytes of an array that counts
_MOVES_NOTHING = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "constant"}


def norm(params: Any, state: Any, grads: Any, loss: Any) -> Any:
    """The yardstick: a bare read of the gradients' norms."""
    del loss
    return params, state, optax.tree.norm(grads)


def step_of(tx: Any) -> Callable[..., Any]:
    """A step of Optax's protocol."""

    def step(params: Any, state: Any, grads: Any, loss: Any) -> Any:
        updates, state = tx.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state, loss

    return step


def applied(tx: Any) -> Callable[..., Any]:
    """A step that takes and returns parameters."""

    def step(params: Any, state: Any, grads: Any, loss: Any) -> Any:
        params, state = tx.apply(params, state, grads, loss=loss)
        return params, state, loss

    return step


def variants(params: Any) -> dict[str, tuple[Callable[..., Any], Any, float]]:
    """Returns step, first state and loss of each variant; a loss that is not finite is skipped."""
    nan = float("nan")
    return {
        "norm": (norm, (), 1.0),
        "adamw": (step_of(INNER), INNER.init(params), 1.0),
        "average": (applied(AVERAGED), AVERAGED.init(params), 1.0),
        "made": (applied(GUARDED), GUARDED.init(params), 1.0),
        "skipped, apply": (applied(GUARDED), GUARDED.init(params), nan),
        "skipped, update": (step_of(GUARDED), GUARDED.init(params), nan),
    }


def bytes_outside_of_loops(text: str) -> int:
    """Returns how much the entry computation reads and writes, small arrays left out."""
    entry = text[text.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    sizes: dict[str, int] = {}
    total = 0
    for line in entry.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\(?.*?\)?) ([\w-]+)\((.*)", line)
        if match is None:
            continue
        name, kind, opcode, rest = match.groups()
        sizes[name] = 4 * sum(
            _elements(dims) for dims in re.findall(r"f32\[([\d,]*)\]", kind.partition("{")[0])
        )
        if opcode not in _MOVES_NOTHING:
            operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
            moved = [sizes[name], *(sizes.get(operand, 0) for operand in operands)]
            total += sum(size for size in moved if size >= _LEAST)
    return total


def _elements(dims: str) -> int:
    size = 1
    for dim in filter(None, dims.split(",")):
        size *= int(dim)
    return size


class Runner:
    """One variant, compiled, with the parameters and state that it donates to itself."""

    def __init__(self, step: Any, params: Any, state: Any, loss: float) -> None:
        self.carried = jax.tree.map(jnp.copy, (params, state))
        self.loss = jnp.float32(loss)
        jitted = jax.jit(step, donate_argnums=(0, 1))
        self.compiled = jitted.lower(*self.carried, params, self.loss).compile()
        self.bytes = bytes_outside_of_loops(self.compiled.as_text() or "")

    def run(self, grads: Any) -> None:
        """Makes one step."""
        *carried, _ = jax.block_until_ready(self.compiled(*self.carried, grads, self.loss))
        self.carried = tuple(carried)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, default=8, help="parameters, square")
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--rounds", type=int, help="41, or 11 with --quick")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields what is skipped, what is made, and what is read."""
    params = {f"w{i}": jnp.full((options.side, options.side), 0.5) for i in range(options.leaves)}
    runners = {
        name: Runner(step, params, state, loss)
        for name, (step, state, loss) in variants(params).items()
    }

    def seconds(*names: str) -> dict[str, list[float]]:
        calls = {name: functools.partial(runners[name].run, params) for name in names}
        return interleave(calls, options.rounds or (11 if options.quick else 41), clock=CLOCK)

    for how in ("apply", "update"):
        skipped = f"skipped, {how}"
        # Alone with its peer: what runs before either decides what is in the caches.
        times = seconds("norm", skipped)
        yield timed(skipped, times[skipped], times["norm"])
        yield counted(
            f"bytes of a skipped step, {how}", runners[skipped].bytes, runners["norm"].bytes
        )
    times = seconds("adamw", "made", "average")
    for name in ("made", "average"):
        yield timed(name, times[name], times["adamw"])
    added = runners["average"].bytes - runners["adamw"].bytes
    yield counted("bytes of an average", added, 8 * options.leaves * options.side**2)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments, environment=ENVIRONMENT)
