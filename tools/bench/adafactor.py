"""Cost of Adafactor compared with `optax.adafactor`: tracing, compiling and running a step.

    hatch run dev:python tools/bench/adafactor.py --leaves 300

Every round traces and compiles a new function, so that nothing is remembered.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import opt_adafactor
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

OPTAX = "optax.adafactor"
FORMS = ("transformation", "definition")
PHASES = ("trace", "lower", "compile", "all three")
FIGURES = {
    **{f"{phase}, {form}": Figure(OPTAX) for form in FORMS for phase in PHASES[:-1]},
    **{f"all three, {form}": Figure(OPTAX, 1.0) for form in FORMS},
    **{f"call, {form}": Figure(OPTAX, 1.0) for form in FORMS},
    **{f"bytes accessed, {form}": Figure(OPTAX, None, "B") for form in FORMS},
    **{f"StableHLO, {form}": Figure(OPTAX, 1.0, "lines") for form in FORMS},
}


def variants(params: Any) -> dict[str, Variant]:
    """Returns function and operands of every variant."""
    theirs = optax.adafactor(0.1, min_dim_size_to_factor=8)
    ours = opt_adafactor.adafactor(0.1, min_dim_size_to_factor=8)
    optimizer = opt_adafactor.Adafactor(0.1, min_dim_size_to_factor=8).create(params)
    return {
        OPTAX: (optax_step(theirs), (params, theirs.init(params), params)),
        "transformation": (optax_step(ours), (params, ours.init(params), params)),
        "definition": (lambda o, g: o.apply_gradient(g), (optimizer, params)),
    }


def build(variant: Variant) -> tuple[list[float], Any]:
    """Returns the processor's seconds of tracing, lowering, compiling and the three; and it all."""
    times = [time.process_time()]
    traced = trace(*variant)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    return [*(b - a for a, b in itertools.pairwise(times)), times[-1] - times[0]], (
        lowered,
        compiled,
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, help="300, or 60 with --quick")
    parser.add_argument("--shapes", type=int, default=12, help="how many different ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, help="of 12 square matrices, for calls: 1024, or 256")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    leaves = options.leaves or (60 if options.quick else 300)
    size = options.size or (256 if options.quick else 1024)
    params = {f"w{i}": jnp.ones((8 + i % options.shapes, 16)) for i in range(leaves)}
    table = variants(params)
    rounds = [
        {name: build(variant)[0] for name, variant in table.items()}
        for _ in range(1 + (2 if options.quick else options.rounds))
    ][1:]  # the first one imports and warms up
    for form in FORMS:
        for i, phase in enumerate(PHASES):
            ours, theirs = ([r[name][i] for r in rounds] for name in (form, OPTAX))
            yield timed(f"{phase}, {form}", ours, theirs, size=leaves)
    lines = {
        name: len(trace(*variant).lower().as_text().splitlines()) for name, variant in table.items()
    }
    for form in FORMS:
        yield counted(f"StableHLO, {form}", lines[form], lines[OPTAX], size=leaves)

    large = variants({f"w{i}": jnp.ones((size, size)) for i in range(12)})
    programs = {name: build(variant)[1][1] for name, variant in large.items()}
    found = {name: counts(program) for name, program in programs.items()}
    calls: Mapping[str, Callable[[], Any]] = {
        name: functools.partial(program, *large[name][1]) for name, program in programs.items()
    }
    called = interleave(calls, 8 if options.quick else 27)
    for form in FORMS:
        yield timed(f"call, {form}", called[form], called[OPTAX])
        yield counted(
            f"bytes accessed, {form}",
            found[form].bytes_accessed,
            found[OPTAX].bytes_accessed,
            note=found[form].misleading,
        )


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
