"""What accumulation, averages and guards cost, compared with Optax and with lower bounds.

    hatch run dev:bench --only accumulate

Mini-steps of `MultiSteps` with k = 4, and steps that a guard skips or makes. Every variant owns its
parameters and state and donates them. Bytes are those that the compiled program reads and writes,
without the loop that makes a step.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _common import (
    Counts,
    Row,
    Runner,
    counted,
    interleave,
    on_accelerator,
    optax_step,
    seconds,
    timed,
)
from _kernels import kernels
from opt_accumulate import MultiSteps, guard, with_average

K = 4
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
# Of each form: the limits of a mini-step that does not emit, of a window, of temporaries.
FORMS: dict[str, tuple[float | None, float | None, float | None]] = {
    "apply": (1.1, 1.1, 0.01),
    "update": (5.0, 3.0, 1.01),
    "optax": (None, None, None),
}


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows."""
    large = on_accelerator() and not quick
    yield from measure_windows(12, 4096 if large else 256 if quick else 1024, 9)
    yield from measure_guard(8, 8192 if large else 2048, 11 if quick else 41)


def measure_windows(leaves: int, side: int, rounds: int) -> Iterator[Row]:
    """Yields three rows of each form."""
    params = {f"w{i}": jnp.full((side, side), 0.5) for i in range(leaves)}
    theirs = optax.MultiSteps(ADAMW, K)
    ours = MultiSteps(ADAMW, K)

    def accumulate(params: Any, state: Any, grads: Any) -> Any:
        acc, count = state
        acc = jax.tree.map(lambda a, g: a + (g - a) / (count + 1), acc, grads)
        return params, (acc, (count + 1) % K)

    zeros = jax.tree.map(jnp.zeros_like, params)
    runners = {
        "accumulate": Runner(accumulate, params, (zeros, jnp.int32(0)), params),
        "adamw": Runner(optax_step(ADAMW), params, ADAMW.init(params), params),
        "apply": Runner(ours.apply, params, ours.init(params), params),
        "update": Runner(optax_step(ours), params, ours.init(params), params),
        "optax": Runner(optax_step(theirs), params, theirs.init(params), params),
    }
    steps: dict[str, list[float]] = {name: [] for name in runners}
    windows: dict[str, list[float]] = {name: [] for name in runners}
    for i in range(-1, rounds):
        for name, runner in runners.items():
            window = [seconds(runner, time.perf_counter) for _ in range(K)]
            if i >= 0:
                steps[name].append(statistics.median(window[:-1]))
                windows[name].append(sum(window))
    bare, least = "bare accumulation", f"{K} accumulations, 1 AdamW"
    pairs = zip(windows["accumulate"], windows["adamw"], strict=True)
    lowest = [a + b / K for a, b in pairs]
    size = sum(leaf.nbytes for leaf in params.values())
    for form, (of_step, of_window, of_memory) in FORMS.items():
        yield timed(f"mini-step, {form}", steps[form], bare, steps["accumulate"], limit=of_step)
        yield timed(f"window, {form}", windows[form], least, lowest, limit=of_window)
        held = Counts(runners[form].compiled).temporaries
        yield counted(f"temporaries, {form}", held, "parameters", size, limit=of_memory)


def measure_guard(leaves: int, side: int, rounds: int) -> Iterator[Row]:
    """Yields what is skipped, what is made, and what is read."""
    params = {f"w{i}": jnp.full((side, side), 0.5) for i in range(leaves)}
    averaged = with_average(CLIPPED, 0.999)
    guarded = guard(averaged)

    def norm(params: Any, state: Any, grads: Any, loss: Any) -> Any:
        return params, optax.tree.norm(grads)

    def plain(params: Any, state: Any, grads: Any, loss: Any) -> Any:
        return optax_step(CLIPPED)(params, state, grads)

    def update(params: Any, state: Any, grads: Any, loss: Any) -> Any:
        return optax_step(guarded)(params, state, grads, loss=loss)

    def apply(tx: Any) -> Any:
        return lambda params, state, grads, loss: tx.apply(params, state, grads, loss=loss)

    one, nan = jnp.float32(1), jnp.float32(jnp.nan)  # a loss that is not finite is skipped
    runners = {
        "norm": Runner(norm, params, one, params, one),
        "adamw": Runner(plain, params, CLIPPED.init(params), params, one),
        "average": Runner(apply(averaged), params, averaged.init(params), params, one),
        "made": Runner(apply(guarded), params, guarded.init(params), params, one),
        "apply": Runner(apply(guarded), params, guarded.init(params), params, nan),
        "update": Runner(update, params, guarded.init(params), params, nan),
    }
    number = leaves * side**2
    moved = {
        name: sum(k.bytes for k in kernels(runner.compiled.as_text(), loops=False)) / number
        for name, runner in runners.items()
    }

    def times(*names: str) -> dict[str, list[float]]:
        return interleave({name: runners[name] for name in names}, rounds, clock=time.perf_counter)

    peer = "norm of the gradients"
    for how, limit, of_bytes in (("apply", 1.15, 1.001), ("update", None, None)):
        # Alone with its peer: what runs before either decides what is in the caches.
        found = times("norm", how)
        yield timed(f"skipped, {how}", found[how], peer, found["norm"], limit=limit)
        figure = f"bytes a parameter, skipped, {how}"
        yield counted(figure, moved[how], peer, moved["norm"], limit=of_bytes)
    found, peer = times("adamw", "made", "average"), "AdamW, clipped"
    most = 1.45 if on_accelerator() else 1.3  # 44 bytes for 32; on a CPU 76 for 60
    for name in ("made", "average"):
        yield timed(name, found[name], peer, found["adamw"], limit=most)
    yield counted("bytes a parameter, AdamW, clipped", moved["adamw"], "36, the least", 36)
    added = moved["average"] - moved["adamw"]
    yield counted("bytes a parameter, average", added, "8, the least", 8, limit=1.501)
