"""What planning costs, and deriving the axes of a state.

    hatch run dev:bench --only plans

Planning is held against evaluating `init` once for its shapes. Nothing is allocated: parameters are
shapes and meshes are abstract. `a tenth` is the time for a tenth of the leaves: 10 is linear.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from _common import Row, interleave, seconds, timed
from jax.sharding import AbstractMesh, PartitionSpec
from opt_partition import explain, logical_to_mesh, memory_plan

# A layer of eight: matrices, one of them square, stacked ones, vectors and a scalar.
LAYER: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "wi": ((256, 384), ("embed", "mlp")),
    "bi": ((384,), ("mlp",)),
    "query": ((256, 256), ("embed", "heads")),
    "stacked": ((6, 160, 176), ("layers", "embed", "mlp")),
    "scale": ((24,), ("embed",)),
    "in": ((512, 128), ("vocab", "embed")),
    "out": ((128, 512), ("embed", "vocab")),
    "gate": ((), ()),
}
RULES = (
    ("embed", "data"),
    *((name, "model") for name in ("mlp", "heads", "vocab")),
    ("layers", None),
)
INIT = "eval_shape(init)"
MANY = 10_000  # only AdamW and Adafactor with more leaves than that


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "AdamW": lambda: optax.adamw(1e-3),
    "Adafactor": lambda: optax.adafactor(1e-3),
    "L-BFGS": optax.scale_by_lbfgs,
}


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows."""
    before: list[float] = []
    for size in [100, 1_000] if quick else [100, 1_000, 10_000, 100_000]:
        layers = [f"layer_{i}" for i in range(-(-size // len(LAYER)))]
        params, axes, specs = (
            {layer: {name: of(*leaf) for name, leaf in LAYER.items()} for layer in layers}
            for of in (
                lambda shape, _: jax.ShapeDtypeStruct(shape, "float32"),
                lambda _, names: names,
                lambda _, names: PartitionSpec(*names),
            )
        )
        mesh = AbstractMesh((4, 4), ("data", "model"))
        rounds = 3 if quick else 5
        init = functools.partial(evaluate, optax.adamw, params)
        lay_out = functools.partial(logical_to_mesh, specs, RULES, mesh, params)
        times = interleave({INIT: init, "ours": lay_out}, rounds)
        yield timed("logical_to_mesh", times["ours"], INIT, times[INIT], size=size)
        if before:
            yield timed("logical_to_mesh", times["ours"], "a tenth", before, limit=15.0, size=size)
        before = times["ours"]
        for data in (4, 1024):
            mesh = AbstractMesh((data, 4), ("data", "model"))
            plan = functools.partial(
                memory_plan, optax.adamw(1e-3), params, axes, RULES, mesh, zero="data"
            )
            times = interleave({INIT: init, "ours": plan}, rounds)
            figure = f"memory_plan, {4 * data} devices"
            yield timed(figure, times["ours"], INIT, times[INIT], size=size)
        for name, make in TRANSFORMATIONS.items():
            if size <= MANY or name in ("AdamW", "Adafactor"):
                yield measure_explain(name, make, params, axes, size)


def evaluate(make: Any, params: Any) -> None:
    """Evaluates the shapes of a state anew."""
    jax.eval_shape(lambda p: make(1e-3).init(p), params)


def measure_explain(name: str, make: Any, params: Any, axes: Any, size: int) -> Row:
    """Returns one row. Each round has a new transformation: JAX remembers what it evaluated."""
    evaluations, ours, theirs = 0, [], []
    for _ in range(3):
        tx = make()
        theirs.append(seconds(functools.partial(evaluate, lambda _, tx=tx: tx, params)))
        found: list[Any] = []
        ours.append(seconds(lambda tx=tx, to=found: to.append(explain(tx, params, axes))))  # type: ignore[misc]
        evaluations = found[0].evaluations
    note = f"evaluations: {evaluations}"
    return timed(f"explain, {name}", ours, INIT, theirs, size=size, note=note)
