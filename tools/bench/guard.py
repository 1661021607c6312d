r"""What a step costs that a guard skips, and what an average adds to one that is made.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 \
        hatch run dev:python tools/bench/guard.py --leaves 12 --side 1024

The two variables keep the heap between calls, as an accelerator's allocator does. Every variant
owns its parameters and state and donates them. A round times each once, in turn, in this process;
printed are medians over rounds of ratios within a round. Bytes are those that XLA counts for the
compiled program; of a skipped step without the loop that makes one.
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from opt_accumulate import guard, with_average

INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
AVERAGED = with_average(INNER, 0.999)
GUARDED = guard(AVERAGED)
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
        "guard, made": (applied(GUARDED), GUARDED.init(params), 1.0),
        "guard, skipped": (applied(GUARDED), GUARDED.init(params), nan),
        "guard by update, skipped": (step_of(GUARDED), GUARDED.init(params), nan),
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
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.bytes = bytes_outside_of_loops(self.compiled.as_text() or "") / size
        memory: Any = self.compiled.memory_analysis()
        self.temporaries = memory.temp_size_in_bytes / size

    def seconds(self, grads: Any) -> float:
        """Returns how long one step takes."""
        start = time.perf_counter()
        *carried, _ = jax.block_until_ready(self.compiled(*self.carried, grads, self.loss))
        self.carried = tuple(carried)
        return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--leaves", type=int, default=12, help="parameters, square")
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()

    shape = options.side, options.side
    params = {f"w{i}": jnp.full(shape, 0.5) for i in range(options.leaves)}
    runners = {
        name: Runner(step, params, state, loss)
        for name, (step, state, loss) in variants(params).items()
    }
    measured = [
        {name: runner.seconds(params) for name, runner in runners.items()}
        for _ in range(options.rounds + 1)
    ][1:]
    print(f"{options.leaves} leaves of {shape}, {options.rounds} rounds,")
    print(f"jax {jax.__version__}, optax {optax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'':26}{'time /':>9}{'time /':>9}{'bytes /':>10}{'temporaries':>13}")
    print(f"{'':26}{'norm':>9}{'adamw':>9}{'parameter':>10}{'/ parameter':>13}")
    for name, runner in runners.items():
        ratios = [
            statistics.median(times[name] / times[other] for times in measured)
            for other in ("norm", "adamw")
        ]
        print(
            f"{name:26}{ratios[0]:9.2f}{ratios[1]:9.2f}{runner.bytes:10.2f}"
            f"{runner.temporaries:13.2f}"
        )


if __name__ == "__main__":
    main()
