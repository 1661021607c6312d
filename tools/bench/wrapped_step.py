"""What wrapping costs: tracing, calling and compiling a wrapped AdamW step, and raw Optax's.

    hatch run dev:python tools/bench/wrapped_step.py --leaves 1000

Beside the wrapped step: the run-time learning rate, against Optax's own way to have one
(`inject_hyperparams`), and reading the rate that a schedule gives. `control` is raw Optax's step
compiled a second time: what no layer at all costs, and so how far the other ratios can be trusted.
"""

import argparse
import functools
import time
from collections.abc import Iterator
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

SCHEDULE = optax.cosine_decay_schedule(1e-3, 1000)
RAW = "raw Optax"
FIGURES = {
    "trace": Figure(RAW, 1.1),
    "trace, inject_hyperparams": Figure(RAW),
    "trace, learning_rate=": Figure("wrapped", 1.1),
    "trace, resolve_hyper_params": Figure("wrapped"),
    "call": Figure(RAW, 1.02),
    "call, control": Figure(RAW),
    "call, inject_hyperparams": Figure(RAW),
    "call, learning_rate=": Figure(RAW),
    "bytes accessed": Figure(RAW, 1.001, "B"),
    "bytes accessed, learning_rate=": Figure(RAW, 1.001, "B"),
    "instructions": Figure(RAW, 1.01, "instructions"),
    "aliases": Figure(RAW, None, "aliases"),
}


def injected_step(params: Any, state: Any, grads: Any, rate: Any) -> Any:
    """One step with the rate in the state, as `inject_hyperparams` wants it."""
    state = state._replace(hyperparams={**state.hyperparams, "learning_rate": rate})
    updates, state = optax.inject_hyperparams(optax.adamw)(1e-3).update(grads, state, params)
    return optax.apply_updates(params, updates), state


def variants(leaves: int) -> dict[str, Variant]:
    """Returns function and operands of every variant."""
    params = {f"w{i}": jnp.ones((8, 8)) for i in range(leaves)}
    definition = opt.adamw(SCHEDULE)
    optimizer = definition.create(params)
    injected = optax.inject_hyperparams(optax.adamw)(1e-3).init(params)
    rate = jnp.float32(1e-3)
    tx = optax.adamw(SCHEDULE)
    raw = (optax_step(tx), (params, tx.init(params), params))
    return {
        RAW: raw,
        "control": (optax_step(tx), raw[1]),
        "wrapped": (lambda o, g: o.apply_gradient(g), (optimizer, params)),
        "inject_hyperparams": (injected_step, (params, injected, params, rate)),
        "learning_rate=": (
            lambda o, g, r: o.apply_gradient(g, learning_rate=r),
            (optimizer, params, rate),
        ),
        "resolve_hyper_params": (
            lambda o, g: (o.apply_gradient(g), opt.resolve_hyper_params(o)),
            (optimizer, params),
        ),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, nargs="+", help="parameters, of 8 x 8 floats each")
    parser.add_argument("--rounds", type=int, default=9)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of every size."""
    for leaves in options.leaves or ([100] if options.quick else [10, 100, 1000]):
        yield from measure_size(leaves, options.rounds)


def measure_size(leaves: int, rounds: int) -> Iterator[Row]:
    """Yields the rows of one size."""
    table = variants(leaves)
    traces = {name: functools.partial(trace, *variant) for name, variant in table.items()}
    traced = interleave(traces, rounds)
    yield timed("trace", traced["wrapped"], traced[RAW], size=leaves)
    for name, peer in (
        ("inject_hyperparams", RAW),
        ("learning_rate=", "wrapped"),
        ("resolve_hyper_params", "wrapped"),
    ):
        yield timed(f"trace, {name}", traced[name], traced[peer], size=leaves)

    # Donated, as in training: what is aliased is part of the counts.
    programs = {
        name: jax.jit(
            step, donate_argnums=(0, 1) if name in (RAW, "inject_hyperparams") else 0
        ).lower(*operands)
        for name, (step, operands) in table.items()
    }
    found = {name: counts(program.compile()) for name, program in programs.items()}
    for name, suffix in (
        ("wrapped", ""),
        ("learning_rate=", ", learning_rate="),
    ):
        yield counted(
            f"bytes accessed{suffix}",
            found[name].bytes_accessed,
            found[RAW].bytes_accessed,
            size=leaves,
            note=found[name].misleading,
        )
    yield counted(
        "instructions", found["wrapped"].instructions, found[RAW].instructions, size=leaves
    )
    yield counted("aliases", found["wrapped"].aliases, found[RAW].aliases, size=leaves)

    calls = {name: functools.partial(jax.jit(f), *args) for name, (f, args) in table.items()}
    del calls["resolve_hyper_params"]
    # The processor's time of the calling thread: its flattening, dispatch and small kernels.
    called = interleave(calls, 15 * rounds, clock=time.thread_time)
    yield timed("call", called["wrapped"], called[RAW], size=leaves)
    for name in ("control", "inject_hyperparams", "learning_rate="):
        yield timed(f"call, {name}", called[name], called[RAW], size=leaves)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
