"""Steps compiled for 8 to 512 virtual devices, and what `verify` costs beside compiling them.

    hatch run dev:bench --only scale

Nothing runs and nothing is allocated: the program of many devices is that of one of them. It should
have as many collectives as on eight devices, and arguments of the size that the plan says. `leaves`
grow in training steps on eight devices, whose text `verify` reads. Muon as planned is held against
`optax.contrib.muon` as the compiler has it: this alone runs, on eight devices of four by two.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from _common import Counts, Row, counted, interleave, no_garbage, timed
from _steps import MUON, OPTAX_MUON, OPTIMIZERS, ZERO, Planned, plan_step
from opt_partition import read_collectives, verify

DEVICES = 512
# XLA's compiler for CPUs cuts an all-to-all into an operand for each device, and compiles each as a
# kernel of its own; that for GPUs keeps it whole. Without this a program cannot run on CPUs.
AS_ELSEWHERE = {"xla_disable_hlo_passes": "all_to_all_decomposer"}


def compiled(planned: Planned, lowered: Any, state_gathers: Any = "error") -> tuple[Any, ...]:
    """Returns the program, and the seconds of compiling and of verifying it."""
    with no_garbage():
        start = time.process_time()
        program = lowered.compile(compiler_options=AS_ELSEWHERE)
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
    yield from measure_muon(16, (64, 256) if quick else (256, 1024), 1 if quick else 5)


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


def measure_muon(leaves: int, shape: tuple[int, int], rounds: int) -> Iterator[Row]:
    """Yields what a step of Muon moves and computes, and how long it takes to compile and run."""
    plans = {name: plan_step(name, 8, 2, leaves, shape) for name in (MUON, OPTAX_MUON)}
    compiling: dict[str, list[float]] = {name: [] for name in plans}
    steps: dict[str, Callable[[], Any]] = {}
    counts, moved = {}, {}
    for _ in range(rounds):
        for name, planned in plans.items():
            start = time.process_time()
            program: Any = planned.lower().compile()
            compiling[name].append(time.process_time() - start)
            counts[name], moved[name] = Counts(program), read_collectives(program)
            steps[name] = step_of(planned, program)
    ours, theirs = counts.values()
    sent = [sum(x.count * math.prod(x.shape) for x in rows) for rows in moved.values()]
    number = [sum(x.count for x in rows) for rows in moved.values()]
    yield counted("Muon, collectives", number[0], OPTAX_MUON, number[1], size=leaves)
    yield counted("Muon, elements that move", sent[0], OPTAX_MUON, sent[1], size=leaves)
    yield counted("Muon, operations", ours.flops, OPTAX_MUON, theirs.flops, size=leaves)
    times = interleave(steps, rounds)
    for what, found in (("compile", compiling), ("a step", times)):
        yield timed(f"Muon, {what}", found[MUON], OPTAX_MUON, found[OPTAX_MUON], size=leaves)


def step_of(planned: Planned, program: Any) -> Callable[[], Any]:
    """Returns a call of the program with arrays of its own, which it donates."""
    plan = planned.plan
    params, grads = (
        jax.tree.map(lambda x, at: jnp.ones(x.shape, device=at), planned.params, of.shardings)
        for of in (plan.params, plan.grads)
    )
    carried = [params, jax.jit(planned.tx.init, out_shardings=plan.state.shardings)(params)]

    def step() -> Any:
        carried[:] = program(*carried, grads)
        return carried

    return step
