"""Steps of each package next to the library that they replace: tracing, compiling, calling, counts.

    hatch run dev:bench --only steps

`control` is raw Optax's step compiled a second time: what no layer at all costs, and so how far the
other ratios can be trusted.
"""

import functools
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import opt_accumulate
import opt_adafactor
import opt_legacy_stax
import opt_optax_bridge as opt
import optax
from _common import Counts, Row, counted, interleave, on_accelerator, optax_step, timed
from jax.example_libraries import optimizers
from opt_core import MultiOptimizer

RAW, GROUPS = "raw Optax", 4


@dataclass(frozen=True)
class Variant:
    """A step, its operands, the name of its peer, and limits of ratios to that."""

    step: Callable[..., Any]
    operands: tuple[Any, ...]
    peer: str
    limits: Mapping[str, float]

    def trace(self, **options: Any) -> Any:
        """Traces the step without hitting the cache of `jit`, which is keyed by the function."""
        return jax.jit(lambda *args: self.step(*args), **options).trace(*self.operands)

    def compile(self) -> Any:
        """Compiles it, donated as in training: what is aliased is part of the counts."""
        donated = (0, 1) if isinstance(self.operands[0], dict) else 0
        return self.trace(donate_argnums=donated).lower().compile()


Table = dict[str, Variant]


def variant(step: Callable[..., Any], *operands: Any, peer: str = "", **limits: float) -> Variant:
    """Returns a variant; without a peer it is one."""
    return Variant(step, operands, peer, limits)


def transformation(tx: Any, params: Any, **rest: Any) -> Variant:
    """Returns the step of an Optax transformation, or of ours with an `apply`."""
    step = tx.apply if hasattr(tx, "apply") else optax_step(tx)
    return variant(step, params, tx.init(params), params, **rest)


def gradient_step(optimizer: Any, grads: Any) -> Any:
    """The step of an optimizer."""
    return optimizer.apply_gradient(grads)


def wrapped(params: Any) -> Table:
    """AdamW with a schedule, its run-time rate, and reading its rate."""
    rate, schedule = jnp.float32(1e-3), optax.cosine_decay_schedule(1e-3, 1000)
    optimizer, tx = opt.adamw(schedule).create(params), optax.adamw(schedule)
    inject = optax.inject_hyperparams(optax.adamw)(1e-3)

    def injected(params: Any, state: Any, grads: Any, rate: Any) -> Any:
        state = state._replace(hyperparams={**state.hyperparams, "learning_rate": rate})
        return optax_step(inject)(params, state, grads)

    def overridden(optimizer: Any, grads: Any, rate: Any) -> Any:
        return optimizer.apply_gradient(grads, learning_rate=rate)

    def reported(optimizer: Any, grads: Any) -> Any:
        return optimizer.apply_gradient(grads), opt.resolve_hyper_params(optimizer)

    limits = {"trace": 1.1, "call": 1.02, "bytes": 1.001, "instructions": 1.01}
    return {
        RAW: transformation(tx, params),
        "control": transformation(tx, params, peer=RAW),
        "wrapped": variant(gradient_step, optimizer, params, peer=RAW, **limits),
        "inject_hyperparams": variant(
            injected, params, inject.init(params), params, rate, peer=RAW
        ),
        "learning_rate=": variant(
            overridden, optimizer, params, rate, peer="wrapped", trace=1.1, bytes=1.001
        ),
        "resolve_hyper_params": variant(reported, optimizer, params, peer="wrapped"),
    }


def grouped(params: Any) -> Table:
    """An AdamW for each of four groups; the first time, patterns are matched against paths."""
    labels = {name: f"kind_{i % GROUPS}" for i, name in enumerate(params)}
    txs: dict[Hashable, Any] = {f"kind_{i}": optax.adamw(1e-3 / (i + 1)) for i in range(GROUPS)}
    named = {f"{name}_{labels[name]}": leaf for name, leaf in params.items()}

    def make() -> MultiOptimizer:
        rules = [(f".*_kind_{i}", opt.adamw(1e-3 / (i + 1))) for i in range(GROUPS)]
        return MultiOptimizer.from_rules(rules)

    optimizer, peer = make().create(named), "optax.partition"
    limits = {"trace": 1.0, "call": 1.02, "bytes": 1.001}
    return {
        peer: transformation(optax.partition(txs, labels), params),
        "MultiOptimizer": variant(gradient_step, optimizer, named, peer=peer, **limits),
        "MultiOptimizer, first": variant(
            lambda o, g: o.replace(optimizer_def=make()).apply_gradient(g),
            *(optimizer, named),
            peer=peer,
        ),
    }


def factored(params: Any) -> Table:
    """Adafactor as a transformation and as a definition."""
    peer, least = "optax.adafactor", 8
    limits = {"peer": peer, "build": 1.0, "call": 1.0, "lines": 1.0}
    ours = opt_adafactor.adafactor(0.1, min_dim_size_to_factor=least)
    made = opt_adafactor.Adafactor(0.1, min_dim_size_to_factor=least).create(params)
    return {
        peer: transformation(optax.adafactor(0.1, min_dim_size_to_factor=least), params),
        "Adafactor, transformation": transformation(ours, params, **limits),
        "Adafactor, definition": variant(gradient_step, made, params, **limits),  # type: ignore[arg-type]
    }


def alike(params: Any) -> Table:
    """What traces leaves that are alike once; SGD inside."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of JAX's own optimizers
    inner, skip = optax.sgd(0.1), opt_accumulate.skip_not_finite

    def triple(made: Any, **rest: Any) -> Variant:
        return variant(lambda state, g: made[1](0, g, state), made[0](params), params, **rest)

    pairs: dict[str, tuple[str, Any, Any]] = {
        "MultiSteps": (
            "optax.MultiSteps",
            opt_accumulate.MultiSteps(inner, 4),
            optax.MultiSteps(inner, 4),
        ),
        "MultiSteps, skip": (
            "optax.MultiSteps, skip",
            opt_accumulate.MultiSteps(inner, 4, should_skip_update_fn=skip),
            optax.MultiSteps(inner, 4, should_skip_update_fn=optax.skip_not_finite),
        ),
        "average": (
            "optax.ema of the updates",
            opt_accumulate.with_average(inner, 0.9),
            optax.chain(inner, optax.ema(0.9)),
        ),
    }
    table = {
        "jax.example_libraries": triple(optimizers.adam(0.1)),
        "legacy adam": triple(opt_legacy_stax.adam(0.1), peer="jax.example_libraries", lines=1.0),
    }
    for name, (peer, ours, theirs) in pairs.items():
        table[peer] = transformation(theirs, params)
        table[name] = transformation(ours, params, peer=peer, lines=1.0)
    return table


def rows(what: str, table: Table, found: Mapping[str, Any], **rest: Any) -> Iterator[Row]:
    """Yields a row for each variant that has a peer: of times, or of counts."""
    for name, one in table.items():
        if one.peer:
            ours, theirs = found[name], found[one.peer]
            make = timed if isinstance(ours, list) else counted
            limit = one.limits.get(what)
            yield make(f"{name}: {what}", ours, one.peer, theirs, limit=limit, **rest)


def traces(table: Table, rounds: int, size: int) -> Iterator[Row]:
    """Yields times of tracing, and lines of what is lowered."""
    calls = {name: one.trace for name, one in table.items()}
    yield from rows("trace", table, interleave(calls, rounds), size=size)
    lines = {name: one.trace().lower().as_text().count("\n") for name, one in table.items()}
    yield from rows("lines", table, lines, size=size)


def programs(
    table: Table, rounds: int, size: int, clock: Callable[[], float] | None
) -> Iterator[Row]:
    """Yields times of calls, and counts of what is compiled."""
    calls = {n: functools.partial(jax.jit(one.step), *one.operands) for n, one in table.items()}
    yield from rows("call", table, interleave(calls, rounds, clock=clock), size=size)
    counts = {name: Counts(one.compile()) for name, one in table.items()}
    for what in ("bytes", "instructions", "aliases"):
        found = {name: getattr(count, what) for name, count in counts.items()}
        yield from rows(what, table, found, size=size if what == "bytes" else None)


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows."""
    for size in [100] if quick else [100, 1000]:
        params = {f"w{i}": jnp.ones((8, 8)) for i in range(size)}
        for table in (wrapped(params), grouped(params)):
            yield from traces(table, 3 if quick else 9, size)
            table.pop("MultiOptimizer, first", None)
            yield from programs(table, 45 if quick else 135, size, time.thread_time)
        yield from traces(alike(params), 3 if quick else 7, size)
    size, side = 60 if quick else 300, 256 if quick else 4096 if on_accelerator() else 1024
    table = factored({f"w{i}": jnp.ones((8 + i % 12, 16)) for i in range(size)})
    yield from traces(table, 3 if quick else 7, size)
    found = interleave({name: one.compile for name, one in table.items()}, 2 if quick else 5)
    yield from rows("build", table, found, size=size)
    table = factored({f"w{i}": jnp.ones((side, side)) for i in range(12)})
    yield from programs(table, 8 if quick else 27, 12, None)
