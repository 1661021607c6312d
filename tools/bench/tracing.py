"""What tracing and lowering take where leaves that are alike are traced once.

    hatch run dev:python tools/bench/tracing.py --leaves 1000

AdamW of `OptaxWrapper` is in `wrapped_step.py`, Adafactor in `adafactor.py`.
"""

import argparse
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import opt_accumulate
import opt_legacy_stax
import optax
from _common import Figure, Row, Variant, counted, interleave, main, optax_step, timed, trace
from jax.example_libraries import optimizers

INNER = optax.sgd(0.1)
PEERS = {
    "legacy adam": "jax.example_libraries",
    "MultiSteps.apply": "optax.MultiSteps",
    "MultiSteps, skip": "optax.MultiSteps",
    "average": "optax.ema of the updates",
}
FIGURES = {
    **{f"trace, {name}": Figure(peer) for name, peer in PEERS.items()},
    **{f"lines, {name}": Figure(peer, 1.0, "lines") for name, peer in PEERS.items()},
}


def variants(leaves: int) -> dict[str, tuple[Variant, Variant]]:
    """Returns, for each figure, function and operands of ours and of the peer."""
    params = {f"w{i}": jax.ShapeDtypeStruct((8, 8), "float32") for i in range(leaves)}

    def triple(made: Any) -> Variant:
        init, update, _ = made
        return lambda state, grads: update(0, grads, state), (jax.eval_shape(init, params), params)

    def transformation(tx: Any) -> Variant:
        step = tx.apply if hasattr(tx, "apply") else optax_step(tx)
        return step, (params, jax.eval_shape(tx.init, params), params)

    skips = opt_accumulate.skip_not_finite, optax.skip_not_finite
    pairs: dict[str, tuple[Any, Any]] = {
        "MultiSteps.apply": (opt_accumulate.MultiSteps(INNER, 4), optax.MultiSteps(INNER, 4)),
        "MultiSteps, skip": (
            opt_accumulate.MultiSteps(INNER, 4, should_skip_update_fn=skips[0]),
            optax.MultiSteps(INNER, 4, should_skip_update_fn=skips[1]),
        ),
        "average": (opt_accumulate.with_average(INNER, 0.9), optax.chain(INNER, optax.ema(0.9))),
    }
    return {
        "legacy adam": (triple(opt_legacy_stax.adam(0.1)), triple(optimizers.adam(0.1))),
        **{name: (transformation(a), transformation(b)) for name, (a, b) in pairs.items()},
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, nargs="+", help="parameters, of 8 x 8 floats each")
    parser.add_argument("--rounds", type=int, default=7)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of every size."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # of JAX's own optimizers
    for leaves in options.leaves or ([100] if options.quick else [100, 1000]):
        for name, (ours, theirs) in variants(leaves).items():
            calls = {
                "peer": functools.partial(trace, *theirs),
                name: functools.partial(trace, *ours),
            }
            times = interleave(calls, 3 if options.quick else options.rounds)
            yield timed(f"trace, {name}", times[name], times["peer"], size=leaves)
            lines = [trace(*x).lower().as_text().count("\n") for x in (ours, theirs)]
            yield counted(f"lines, {name}", *lines, size=leaves)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
