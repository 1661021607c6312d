"""Steps compiled for hundreds of virtual devices, next to the same steps for eight.

    hatch run dev:python tools/bench/scale.py --devices 256 512

Nothing runs and nothing is allocated: the program of many devices is that of one of them. It should
have as many collectives as on eight devices, and arguments of the size that the plan says; `verify`
reads each.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
from _common import Counts, Figure, Row, counted, counts, main, optax_step, timed
from _steps import OPTIMIZERS, plan_step
from opt_partition import Expected, verify
from tqdm import tqdm

EIGHT = "8 devices"
FIGURES = {
    **{f"compile, {name}": Figure(EIGHT) for name in OPTIMIZERS},
    **{f"collectives, {name}": Figure(EIGHT, 1.0, "collectives") for name in OPTIMIZERS[:2]},
    # How matrices are shared out depends on how many there are for each device.
    "collectives, Muon": Figure("the plan", 1.0, "collectives"),
    **{f"bytes of arguments, {name}": Figure("the plan", 1.001, "B") for name in OPTIMIZERS},
    **{f"verify, {name}": Figure("compiling it", 0.1) for name in OPTIMIZERS},
}
MOST = 512


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step, compiled.

    Attributes:
      seconds: that it took.
      verifying: the seconds that `verify` took.
      counts: of the program.
      arguments: bytes of its arguments on a device.
      planned: what the plan says of them.
      collectives: how many are planned; `None` without such a plan.
    """

    seconds: float
    verifying: float
    counts: Counts
    arguments: int
    planned: int
    collectives: int | None


def compile_step(name: str, devices: int, leaves: int) -> Compiled:
    """Compiles one step for the first of the virtual devices."""
    planned = plan_step(name, devices, 4, leaves, (1024, 4096))
    plan = planned.plan
    places = (plan.params.shardings, plan.state.shardings)
    jitted = jax.jit(
        optax_step(planned.tx),
        in_shardings=(*places, plan.grads.shardings),
        out_shardings=places,
        donate_argnums=(0, 1),
    )
    lowered = jitted.lower(planned.params, planned.state, planned.params)
    start = time.process_time()
    program: Any = lowered.compile()
    middle = time.process_time()
    expected = Expected((*places, plan.grads.shardings), places)
    verify(program, expected, state_gathers="any" if name == "Muon" else "error")
    return Compiled(
        middle - start,
        time.process_time() - middle,
        counts(program),
        int(program.memory_analysis().argument_size_in_bytes),
        sum(part.bytes_per_device for part in (plan.params, plan.grads, plan.state)),
        planned.collectives,
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--devices", type=int, nargs="+", help="256 and 512, or 64 with --quick")
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--rounds", type=int, help="3, or 1 with --quick")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    sizes = [8, *(options.devices or ([64] if options.quick else [256, 512]))]
    rounds = options.rounds or (1 if options.quick else 3)
    for name in OPTIMIZERS:
        found: dict[int, list[Compiled]] = {size: [] for size in sizes}
        for _ in tqdm(range(rounds), leave=False, desc=name, disable=None):
            for size in sizes:
                found[size].append(compile_step(name, size, options.leaves))
        few, *_ = found[8]
        for size in sizes[1:]:
            ours, theirs = ([one.seconds for one in found[n]] for n in (size, 8))
            yield timed(f"compile, {name}", ours, theirs, size=size)
            yield timed(f"verify, {name}", [one.verifying for one in found[size]], ours, size=size)
            many, *_ = found[size]
            expected = many.collectives or sum(few.counts.collectives.values())
            there = sum(many.counts.collectives.values())
            yield counted(f"collectives, {name}", there, expected, size=size)
            figure = f"bytes of arguments, {name}"
            yield counted(figure, many.arguments, many.planned, size=size)


if __name__ == "__main__":
    # A program for so many devices is compiled on the CPU wherever this runs.
    main(__doc__, FIGURES, measure, arguments, devices=MOST, sizes="devices")
