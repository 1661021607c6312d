"""AdamW and Muon next to PyTorch's on the same shapes, and AdamW next to what the memory allows.

    hatch run dev:python tools/bench/peers.py --quick
    hatch run peers:python tools/bench/peers.py --device gpu

The limit of a step is the time in which this device copies as many bytes as the mathematics reads
and writes: parameter, gradient and two moments read, all but the gradient written. That is 28 bytes
a float32 parameter, and 22 of a bfloat16 parameter whose moments are float32. PyTorch is measured
where it is installed; on a GPU, where its build has CUDA.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from _common import Figure, Row, counted, counts, interleave, main, optax_step, timed
from opt_matrix import Matrices, muon

LIMIT = "a copy of as many bytes"
LEAST = {"float32": 28, "bfloat16": 22}  # bytes a parameter
FIGURES = {
    **{f"AdamW, {dtype}": Figure(LIMIT) for dtype in LEAST},
    **{f"bytes accessed, AdamW, {dtype}": Figure("the least", None, "B") for dtype in LEAST},
}
if importlib.util.find_spec("torch"):
    FIGURES |= {
        **{f"AdamW next to torch, {dtype}": Figure("torch, foreach") for dtype in LEAST},
        **{f"AdamW next to torch fused, {dtype}": Figure("torch, fused") for dtype in LEAST},
        "Muon next to torch": Figure("torch.optim.Muon"),
    }

Calls = dict[str, Callable[[], Any]]


class Run:
    """A compiled step that is given what it returned, its buffers donated."""

    def __init__(self, tx: Any, shapes: list[tuple[int, int]], dtype: str) -> None:
        self.grads = [jnp.full(shape, 1e-3, dtype) for shape in shapes]
        self.params = [jnp.ones(shape, dtype) for shape in shapes]
        wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        self.state = optax.tree.zeros_like(jax.eval_shape(tx.init, wide))  # moments in float32
        step = jax.jit(optax_step(tx), donate_argnums=(0, 1))
        self.compiled: Any = step.lower(self.params, self.state, self.grads).compile()

    def __call__(self) -> Any:
        """Makes one step."""
        self.params, self.state = self.compiled(self.params, self.state, self.grads)
        return self.params


def torch_run(kind: str, shapes: list[tuple[int, int]], dtype: str) -> Callable[[], Any]:
    """Returns a step of PyTorch's optimizer on this run's device."""
    import torch

    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    params = [
        torch.nn.Parameter(torch.ones(shape, dtype=getattr(torch, dtype), device=device))
        for shape in shapes
    ]
    for param in params:
        param.grad = torch.full_like(param, 1e-3)
    optimizer: Any = (
        torch.optim.Muon(params, lr=1e-3)
        if kind == "Muon"
        else torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, **{kind: True})
    )

    def step() -> None:
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()

    return step


def copy_of(size: int) -> Callable[[], Any]:
    """Returns a call that reads and writes `size` bytes in all, in place as a donated step does."""
    copy = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    buffers = [jnp.ones(size // 8, jnp.float32)]

    def call() -> Any:
        buffers[0] = copy(buffers[0])
        return buffers[0]

    return call


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--side", type=int, help="of square matrices: 512 or 1024; 8192 on a GPU")
    parser.add_argument("--leaves", type=int, default=15)
    parser.add_argument("--rounds", type=int, help="20, or 5 with --quick")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    on_gpu = jax.default_backend() == "gpu"
    side = options.side or (512 if options.quick else 8192 if on_gpu else 1024)
    rounds = options.rounds or (5 if options.quick else 20)
    shapes = [(side, side)] * options.leaves
    size = side * side * options.leaves
    has_torch = importlib.util.find_spec("torch") is not None
    for dtype, least in LEAST.items():
        ours = Run(opt.adamw(1e-3, weight_decay=0.1).optax_optimizer, shapes, dtype)
        calls: Calls = {"ours": ours, LIMIT: copy_of(least * size)}
        if has_torch:
            calls |= {kind: torch_run(kind, shapes, dtype) for kind in ("foreach", "fused")}
        times = interleave(calls, rounds, clock=time.perf_counter)
        note = f"bandwidth of the copy: {least * size / min(times[LIMIT]) / 1e9:.3g} GB/s"
        yield timed(f"AdamW, {dtype}", times["ours"], times[LIMIT], size=size, note=note)
        if has_torch:
            moments = "" if dtype == "float32" else "torch's moments are bfloat16, ours float32"
            for kind, name in (("foreach", "torch"), ("fused", "torch fused")):
                figure = f"AdamW next to {name}, {dtype}"
                yield timed(figure, times["ours"], times[kind], size=size, note=moments)
        found = counts(ours.compiled)
        figure = f"bytes accessed, AdamW, {dtype}"
        yield counted(figure, found.bytes_accessed, least * size, size=size, note=found.misleading)
        del ours, calls
    if has_torch:
        yield from measure_muon(shapes[: 4 if not on_gpu else None], rounds)


def measure_muon(shapes: list[tuple[int, int]], rounds: int) -> Iterator[Row]:
    """Yields the row of Muon: five iterations in bfloat16 in both."""
    run = Run(muon(1e-3, matrices=Matrices.by_rank2(), rest=optax.identity()), shapes, "float32")
    calls: Calls = {"ours": run, "torch": torch_run("Muon", shapes, "float32")}
    times = interleave(calls, rounds, clock=time.perf_counter)
    size = sum(rows * columns for rows, columns in shapes)
    yield timed("Muon next to torch", times["ours"], times["torch"], size=size)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments, sizes="parameters")
