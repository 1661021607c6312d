"""Steps compiled for 8 to 512 virtual devices, and what `verify` costs beside compiling them.

    hatch run dev:bench --only scale

Nothing runs and nothing is allocated: the program of many devices is that of one of them. It should
have as many collectives as on eight devices, and arguments of the size that the plan says. `leaves`
grow in training steps on eight devices, whose text `verify` reads.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
from _common import Counts, Row, counted, no_garbage, timed
from _steps import MUON, OPTIMIZERS, ZERO, Planned, plan_step
from opt_partition import verify

DEVICES = 512


def compiled(planned: Planned, lowered: Any, state_gathers: Any = "error") -> tuple[Any, ...]:
    """Returns the program, and the seconds of compiling and of verifying it."""
    with no_garbage():
        start = time.process_time()
        program = lowered.compile()
        middle = time.process_time()
        verify(program, planned.expected, state_gathers=state_gathers)
        return program, middle - start, time.process_time() - middle


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows."""
    for leaves in [16] if quick else [16, 64, 256]:
        planned = plan_step(ZERO, 8, 1, leaves, (64, 256))
        batch = jax.ShapeDtypeStruct((64, 64), "float32")
        found = [compiled(planned, planned.lower(planned.training_step, batch)) for _ in range(4)]
        _, compiling, verifying = zip(*found[1:], strict=True)  # the first imports and warms up
        yield timed("verify, leaves", verifying, "compiling", compiling, limit=0.1, size=leaves)
    for name in OPTIMIZERS:
        yield from measure_devices(name, [8, 64] if quick else [8, 256, 512], 1 if quick else 3)


def measure_devices(name: str, sizes: list[int], rounds: int) -> Iterator[Row]:
    """Yields the rows of one optimizer."""
    plans = {n: plan_step(name, n, 4, 8, (1024, 4096)) for n in sizes}
    gathers = "any" if name == MUON else "error"
    found: dict[int, list[tuple[Any, ...]]] = {n: [] for n in sizes}
    for _ in range(rounds):
        for n, planned in plans.items():
            found[n].append(compiled(planned, planned.lower(), gathers))
    few = Counts(found[8][0][0]).collectives
    theirs = [seconds for _, seconds, _ in found[8]]
    for n in sizes[1:]:
        program = found[n][0][0]
        _, ours, verifying = zip(*found[n], strict=True)
        yield timed(f"compile, {name}", ours, "8 devices", theirs, size=n)
        yield timed(f"verify, {name}", verifying, "compiling it", ours, limit=0.1, size=n)
        # How matrices are shared out depends on how many there are for each device.
        peer, expected = ("the plan", plans[n].collectives) if name == MUON else ("8 devices", few)
        there = Counts(program).collectives
        yield counted(f"collectives, {name}", there, peer, expected or 0, limit=1.0, size=n)
        plan = plans[n].plan
        planned_bytes = sum(p.bytes_per_device for p in (plan.params, plan.grads, plan.state))
        size = program.memory_analysis().argument_size_in_bytes
        figure = f"bytes of arguments, {name}"
        yield counted(figure, size, "the plan", planned_bytes, limit=1.001, size=n)
