"""AdamW and Muon next to PyTorch's on the same shapes, and AdamW next to what the memory allows.

    hatch run peers:bench --only peers --quick

The limit of a step is the time in which this device copies as many bytes as the mathematics reads
and writes: parameter, gradient and two moments read, all but the gradient written. That is 28 bytes
a float32 parameter, and 22 of a bfloat16 parameter whose moments are float32. PyTorch is measured
where it is installed; on a GPU, where its build has CUDA.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from _common import Counts, Row, Runner, counted, interleave, on_accelerator, optax_step, timed
from opt_matrix import Matrices, muon

LIMIT = "a copy of as many bytes"
LEAST = {"float32": 28, "bfloat16": 22}  # bytes a parameter
HAS_TORCH = importlib.util.find_spec("torch") is not None


def run(tx: Any, shapes: list[tuple[int, int]], dtype: str) -> Runner:
    """Returns a step with moments in float32."""
    wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    state = optax.tree.zeros_like(jax.eval_shape(tx.init, wide))
    params = [jnp.ones(shape, dtype) for shape in shapes]
    return Runner(optax_step(tx), params, state, [jnp.full(s, 1e-3, dtype) for s in shapes])


def torch_run(kind: str, shapes: list[tuple[int, int]], dtype: str) -> Callable[[], Any]:
    """Returns a step of PyTorch's optimizer on this run's device."""
    import torch

    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    place = {"dtype": getattr(torch, dtype), "device": "cuda" if on_gpu else "cpu"}
    params = [torch.nn.Parameter(torch.ones(shape, **place)) for shape in shapes]
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


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows."""
    side, rounds = 512 if quick else 8192 if on_accelerator() else 1024, 5 if quick else 20
    shapes = [(side, side)] * 15
    size = side * side * len(shapes)
    for dtype, least in LEAST.items():
        # In place, as a donated step is: half of the bytes are read, half are written.
        copied = jnp.ones(least * size // 8, jnp.float32)
        calls: dict[str, Callable[[], Any]] = {
            "ours": run(opt.adamw(1e-3, weight_decay=0.1).optax_optimizer, shapes, dtype),
            LIMIT: Runner(lambda x, y: (x + 1.0, y), copied, jnp.float32(0)),
        }
        kinds = ("foreach", "fused") if HAS_TORCH else ()
        calls |= {f"torch, {kind}": torch_run(kind, shapes, dtype) for kind in kinds}
        times = interleave(calls, rounds, clock=time.perf_counter)
        ours = times.pop("ours")
        notes = {LIMIT: f"{least * size / min(times[LIMIT]) / 1e9:.3g} GB/s"}
        if dtype == "bfloat16":
            notes |= {f"torch, {kind}": "torch's moments are bfloat16" for kind in kinds}
        for peer, theirs in times.items():
            note = notes.get(peer, "")
            yield timed(f"AdamW, {dtype}", ours, peer, theirs, size=size, note=note)
        runner: Any = calls["ours"]
        found = Counts(runner.compiled)
        rest: Any = {"size": size, "note": found.note}
        yield counted(f"bytes, AdamW, {dtype}", found.bytes, "the least", least * size, **rest)
        del calls, runner
    if HAS_TORCH:  # five iterations in bfloat16 in both
        shapes = shapes[: None if on_accelerator() else 4]
        tx = muon(1e-3, matrices=Matrices.by_rank2(), rest=optax.identity())
        calls = {"ours": run(tx, shapes, "float32"), "torch": torch_run("Muon", shapes, "float32")}
        times = interleave(calls, rounds, clock=time.perf_counter)
        yield timed("Muon", times["ours"], "torch.optim.Muon", times["torch"], size=size)
