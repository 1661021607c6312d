"""Trains one small model in several precisions: a table, and the picture of the ratchet.

    hatch run dev:python examples/compare_precisions.py
    hatch run dev:python examples/compare_precisions.py --steps 100 --seeds 1 --out /tmp/precision

Each method trains the byte-level model of `train_lm.py`, one layer of width 64, on the source of
Python's standard library. `nearest 8 bits` is a re-implementation of the map, the blocks and the
rounding of bitsandbytes and torchao, not their kernels. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
from lm.data import Batches, Text, batches_in_order, load_text
from lm.model import Transformer, next_byte_loss
from lm.sizes import ModelConfig
from matplotlib.figure import Figure

MODEL = ModelConfig(layers=1, d_model=64, heads=4, d_ff=256)
BATCH, WINDOW = 16, 65
PEAK, B2 = 2e-3, 0.999
LOUD, QUIET = 2000, 6000


class Codes(NamedTuple):
    """A moment in 8 bits as other libraries store it.

    Attributes:
      codes: into the map, uint8, of the shape of the moment.
      scale: the largest magnitude of each 256 elements in a row, float32.
    """

    codes: jax.Array
    scale: jax.Array


@functools.cache
def dynamic_map(*, signed: bool) -> np.ndarray[Any, Any]:
    """The map of bitsandbytes: with a zero, and with a 1 but no -1."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        values = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        found += [*values, *-values] if signed else [*values]
    return np.sort(np.asarray(found, np.float32))


def encode(x: jax.Array, *, signed: bool) -> Any:
    """Rounds to the nearest code; small arrays are unchanged."""
    if x.size < 4096:
        return x
    table = dynamic_map(signed=signed)
    blocks = jnp.pad(x.ravel(), (0, -x.size % 256)).reshape(-1, 256)
    scale = jnp.abs(blocks).max(1)
    y = (blocks / jnp.where(scale == 0, 1, scale)[:, None]).ravel()[: x.size].reshape(x.shape)
    return Codes(jnp.searchsorted((table[1:] + table[:-1]) / 2, y).astype(jnp.uint8), scale)


def decode(codes: Any, *, signed: bool) -> jax.Array:
    """The values of codes."""
    if not isinstance(codes, Codes):
        return jnp.asarray(codes)
    each = jnp.repeat(codes.scale, 256)[: codes.codes.size].reshape(codes.codes.shape)
    return jnp.asarray(dynamic_map(signed=signed))[codes.codes] * each


def is_codes(node: Any) -> bool:
    """Whether a node is one moment."""
    return isinstance(node, Codes)


def nearest_adam() -> optax.GradientTransformation:
    """Adam whose moments are rounded to the nearest code, `v` itself and not its root."""
    adam = optax.scale_by_adam(b2=B2)

    def stored(state: Any) -> Any:
        mu = jax.tree.map(functools.partial(encode, signed=True), state.mu)
        nu = jax.tree.map(functools.partial(encode, signed=False), state.nu)
        return state._replace(mu=mu, nu=nu)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        read = {
            "mu": jax.tree.map(functools.partial(decode, signed=True), state.mu, is_leaf=is_codes),
            "nu": second_moments(state),
        }
        updates, new = adam.update(updates, state._replace(**read), params)
        return updates, stored(new)

    return optax.GradientTransformation(lambda params: stored(adam.init(params)), update)


def is_adam(node: Any) -> bool:
    """Whether a node is the state of Adam."""
    return isinstance(node, optax.ScaleByAdamState)


def second_moments(state: Any) -> Any:
    """The decoded `nu` of the state of Adam that is somewhere in a state."""
    nodes = jax.tree.leaves(op.decode(state), is_leaf=is_adam)
    (adam,) = [node for node in nodes if is_adam(node)]
    return jax.tree.map(functools.partial(decode, signed=False), adam.nu, is_leaf=is_codes)


class Largest(NamedTuple):
    """The largest update of the last step, before the learning rate."""

    value: jax.Array


def is_largest(node: Any) -> bool:
    """Whether a node is what `watch` keeps."""
    return isinstance(node, Largest)


def watch() -> optax.GradientTransformation:
    """Keeps the largest update that goes through it."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        sizes = [jnp.abs(leaf).max() for leaf in jax.tree.leaves(updates)]
        return updates, Largest(jnp.stack(sizes).max())

    return optax.GradientTransformation(lambda _: Largest(jnp.zeros(())), update)


def adam(steps: int, first: Any = None) -> Any:
    """Adam with a cosine schedule, its updates watched."""
    rate = optax.cosine_decay_schedule(PEAK, steps)
    first = optax.scale_by_adam(b2=B2) if first is None else first
    return optax.chain(
        first, watch(), optax.scale_by_schedule(lambda count: -jnp.asarray(rate(count)))
    )


Make = Callable[[int], Any]
EIGHT_BITS = op.dynamic8()
METHODS: Mapping[str, tuple[Any, Make]] = {
    "float32": (jnp.float32, adam),
    "bfloat16, cast": (jnp.bfloat16, lambda n: op.quantize_state(adam(n), op.identity())),
    "bfloat16, stochastic": (jnp.bfloat16, lambda n: op.stochastic_weights(adam(n))),
    "bfloat16, Kahan": (jnp.bfloat16, lambda n: op.master_weights(adam(n), storage="kahan")),
    "bfloat16, remainder": (
        jnp.bfloat16,
        lambda n: op.master_weights(adam(n), storage="remainder"),
    ),
    "8 bits": (jnp.float32, lambda n: op.quantize_state(adam(n), EIGHT_BITS)),
    "8 bits and bfloat16, stochastic": (
        jnp.bfloat16,
        lambda n: op.stochastic_weights(op.quantize_state(adam(n), EIGHT_BITS)),
    ),
    "nearest 8 bits": (jnp.float32, lambda n: adam(n, nearest_adam())),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run showed.

    Attributes:
      held_out: loss on text that it did not see, nats.
      loss: of every step.
      largest: the largest update of every step, before the learning rate.
      second: the mean second moment after every step.
      bytes: of parameters and state, per parameter.
    """

    held_out: float
    loss: list[float]
    largest: list[float]
    second: list[float]
    bytes: float


@functools.cache
def program(name: str, steps: int) -> tuple[Transformer, Any, Any]:
    """The model, the transformation and the step of a method, which is compiled once."""
    model, tx = Transformer(MODEL), METHODS[name][1](steps)

    def mean_loss(params: Any, windows: jax.Array) -> jax.Array:
        return next_byte_loss(model, params, windows).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(held: Any, windows: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(held[0], windows)
        params, state = held
        held = op.apply(tx, params, state, grads)
        moments = jax.tree.leaves(second_moments(held[1]))
        mean = sum(jnp.sum(v) for v in moments) / sum(v.size for v in moments)
        return held, (loss, largest_update(held[1]), mean)

    return model, tx, step


def train(name: str, seed: int, steps: int, text: Text) -> Run:
    """Trains one model."""
    model, tx, step = program(name, steps)
    tokens = jnp.zeros((1, WINDOW - 1), jnp.uint8)
    boxed = model.init(jax.random.key(seed), tokens)["params"]
    params = jax.tree.map(lambda p: p.astype(METHODS[name][0]), nn.unbox(boxed))
    held = (params, tx.init(params))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    number = sum(leaf.size for leaf in jax.tree.leaves(params))
    seen = []
    batches = Batches(text.train, seed, batch_size=BATCH, window=WINDOW)
    for windows in itertools.islice(batches, steps):
        held, measured = step(held, windows)
        seen.append(measured)
    losses, largest, second = (np.asarray(row).tolist() for row in zip(*seen, strict=True))
    return Run(evaluate(model, held[0], text), losses, largest, second, size / number)


def largest_update(state: Any) -> jax.Array:
    """What `watch` has kept somewhere in a state."""
    nodes = jax.tree.leaves(state, is_leaf=is_largest)
    found: jax.Array = next(node.value for node in nodes if is_largest(node))
    return found


def evaluate(model: Transformer, params: Any, text: Text, batches: int = 40) -> float:
    """The mean loss over the first batches of the text that was held out."""
    loss = jax.jit(lambda params, windows: next_byte_loss(model, params, windows).sum())
    total = count = 0.0
    rows = batches_in_order(text.held_out, batch_size=64, window=WINDOW)
    for (windows, counts), _ in zip(rows, range(batches), strict=False):
        if counts.all():
            total, count = total + float(loss(params, windows)), count + counts.size
    return total / count


RATCHETS: Mapping[str, Any] = {
    "float32": op.identity(),
    "bfloat16, nearest": op.bfloat16(v="nearest"),
    "bfloat16": op.bfloat16(),
    "8 bits, nearest": None,
    "8 bits": EIGHT_BITS,
}


def ratchet(codec: Any) -> list[float]:
    """The mean of `v` over gradients of 0.5, then of 0.005; one in 256 is large all the time."""
    tx = nearest_adam() if codec is None else op.quantize_state(optax.scale_by_adam(b2=B2), codec)
    params = jnp.zeros((16, 256))
    is_large = jnp.arange(256) == 0

    def step(state: Any, number: jax.Array) -> Any:
        g = jnp.where(is_large, 10.0, jnp.where(number < LOUD, 0.5, 0.005))
        _, state = tx.update(jnp.broadcast_to(g, params.shape), state, params)
        return state, second_moments(state)[:, 1:].mean()

    means = jax.jit(lambda: jax.lax.scan(step, tx.init(params), jnp.arange(LOUD + QUIET))[1])()
    return [float(mean) for mean in means[::20]]


def rows(runs: Mapping[str, Sequence[Run]]) -> Iterator[tuple[str, ...]]:
    """The table: each method beside float32 with the same seed."""
    yield "method", "bytes per parameter", "held-out loss - float32's", "mean", "largest update"
    exact = runs["float32"]
    for name, found in runs.items():
        differences = [run.held_out - of.held_out for run, of in zip(found, exact, strict=True)]
        if name == "float32":
            shown = ", ".join(f"{run.held_out:.4f}" for run in found)
            mean = f"({np.mean([run.held_out for run in found]):.4f})"
        else:
            shown = ", ".join(f"{value:+.3f}" for value in differences)
            mean = f"{np.mean(differences):+.3f}"
        largest = max(max(run.largest[20:] or run.largest) for run in found)
        yield name, f"{found[0].bytes:.2f}", shown, mean, f"{largest:,.1f}"


def picture(runs: Mapping[str, Sequence[Run]], ratchets: Mapping[str, Sequence[float]]) -> Figure:
    """Loss, largest update and second moments over time, of the first seed; and the ratchet."""
    figure = Figure((11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    for name, found in runs.items():
        run = found[0]
        style = "-" if name == "float32" else "--" if "cast" in name or "nearest" in name else ":"
        smooth = np.convolve(run.loss, np.full(20, 1 / 20), "valid") if run.loss[20:] else run.loss
        axes[0, 0].plot(smooth, style, label=name)
        axes[0, 1].plot(run.largest, style, label=name)
        axes[1, 0].plot(run.second, style, label=name)
    steps = np.arange(0, LOUD + QUIET, 20)
    for name, values in ratchets.items():
        axes[1, 1].plot(steps, values, "--" if "nearest" in name else "-", label=name)
    axes[1, 1].axvline(LOUD, color="grey", linewidth=0.5)
    titles = ("loss", "largest update", "mean second moment", "v after gradients fall to 1/100")
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set(title=title, xlabel="step", yscale="linear" if title == "loss" else "log")
        axis.legend(fontsize="x-small")
    return figure


def table(cells: Sequence[Sequence[str]]) -> str:
    """Rows as Markdown."""
    head, *rest = cells
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="*", default=[], help="files or folders to learn from")
    parser.add_argument("--out", type=Path, default=Path("runs/precision"))
    options = parser.parse_args(argv)
    text = load_text(options.data, WINDOW)
    options.out.mkdir(parents=True, exist_ok=True)
    ratchets = {name: ratchet(codec) for name, codec in RATCHETS.items()}
    exact = ratchets["float32"][-1]
    ends = [(name, f"{v[-1]:.1e}", f"{v[-1] / exact:,.1f}") for name, v in ratchets.items()]
    tables = [table([("storage of v", "mean v at the end", "of float32's"), *ends])]
    print(tables[0], flush=True)
    runs: dict[str, list[Run]] = {}
    for name in METHODS:
        runs[name] = [train(name, seed, options.steps, text) for seed in range(options.seeds)]
        print(f"{name}: {[round(run.held_out, 4) for run in runs[name]]}", file=sys.stderr)
    tables.insert(0, table([*rows(runs)]))
    print(tables[0])
    options.out.joinpath("table.md").write_text("\n\n".join(tables) + "\n")
    values = {name: [dataclasses.asdict(run) for run in found] for name, found in runs.items()}
    options.out.joinpath("runs.json").write_text(json.dumps({"runs": values, "ratchet": ratchets}))
    picture(runs, ratchets).savefig(options.out / "precision.png", dpi=90)
    is_finite = all(math.isfinite(run.held_out) for found in runs.values() for run in found)
    return 0 if is_finite else 1


if __name__ == "__main__":
    sys.exit(main())
