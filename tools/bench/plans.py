"""What planning costs: laying axes over meshes, and planning memory, held against `init`'s shapes.

    hatch run dev:python tools/bench/plans.py --leaves 1000 10000 --devices 16 4096

Nothing is allocated: parameters are shapes and meshes are abstract. `ten times the leaves` holds
the time of each size against that of the size before: 10 is linear.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import optax
from _common import Figure, Row, interleave, main, timed
from derivation import make_job
from jax.sharding import AbstractMesh, PartitionSpec
from opt_partition import logical_to_mesh, memory_plan

RULES = (
    ("embed", "data"),
    ("mlp", "model"),
    ("heads", "model"),
    ("vocab", "model"),
    ("layers", None),
)
INIT = "eval_shape(init)"
FIGURES = {
    "logical_to_mesh": Figure(INIT),
    "logical_to_mesh, ten times the leaves": Figure("a tenth", 15.0),
    "memory_plan, 16 devices": Figure(INIT),
    "memory_plan, 4096 devices": Figure(INIT),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--leaves", type=int, nargs="+", help="each ten times the one before")
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of every size."""
    rounds = 3 if options.quick else options.rounds
    sizes = options.leaves or ([100, 1_000] if options.quick else [100, 1_000, 10_000, 100_000])
    before: list[float] | None = None
    for leaves in sizes:
        params, axes = make_job(leaves)
        specs = jax.tree.map(
            lambda names: PartitionSpec(*names), axes, is_leaf=lambda x: isinstance(x, tuple)
        )
        mesh = AbstractMesh((4, 4), ("data", "model"))

        def lay_out(params: Any = params, specs: Any = specs, mesh: Any = mesh) -> None:
            logical_to_mesh(specs, RULES, mesh, params)

        def init(params: Any = params) -> None:
            jax.eval_shape(lambda p: optax.adamw(1e-3).init(p), params)

        times = interleave({INIT: init, "logical_to_mesh": lay_out}, rounds)
        yield timed("logical_to_mesh", times["logical_to_mesh"], times[INIT], size=leaves)
        if before:
            name = "logical_to_mesh, ten times the leaves"
            yield timed(name, times["logical_to_mesh"], before, size=leaves)
        before = times["logical_to_mesh"]
        for data in (4, 1024):

            def plan(params: Any = params, axes: Any = axes, data: int = data) -> None:
                mesh = AbstractMesh((data, 4), ("data", "model"))
                memory_plan(optax.adamw(1e-3), params, axes, RULES, mesh, zero="data")

            times = interleave({INIT: init, "plan": plan}, rounds)
            yield timed(f"memory_plan, {4 * data} devices", times["plan"], times[INIT], size=leaves)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments)
