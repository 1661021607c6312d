"""What Muon on a mesh costs as planned, held against `optax.contrib.muon` as the compiler has it.

    hatch run dev:python tools/bench/matrix.py --layers 24 --side 256

Updates of a decoder's matrices on eight devices, in float32; on a CPU the devices are virtual, and
times are those of all of them together. Limits are the acceptance figures: collectives for each
group of the plan; bytes of results against twice a device's part of the matrices; operations
against the ideal; temporaries against `max_group_bytes`; compiling unrolled layers against the
same ones as stacks, which is no more than their groups.
"""

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax.contrib
from _common import Figure, Row, counted, counts, interleave, main, timed
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_matrix import Matrices, newton_schulz, plan_matrices, scale_by_muon
from opt_partition import read_collectives

contrib: Any = optax.contrib

OPTAX, IDEAL, BOUND = "optax.contrib.muon", "ideal", "planned for"
FIGURES = {
    f"{what}, {layout}": figure
    for layout in ("rows", "columns", "both")
    for what, figure in {
        "step": Figure(OPTAX),
        "collectives beside Optax": Figure(OPTAX, None, ""),
        "collectives": Figure("2 a group", 1.0, ""),
        "bytes beside Optax": Figure(OPTAX, None, "B"),
        "bytes": Figure("2 x matrices / devices", 1.0, "B"),
        "operations beside Optax": Figure(OPTAX, None, "FLOP"),
        "operations": Figure(IDEAL, 1.05, "FLOP"),
        "temporaries beside Optax": Figure(OPTAX, None, "B"),
        "temporaries": Figure("max_group_bytes", 1.1, "B"),
        "compiling beside Optax": Figure(OPTAX),
        "compiling beside stacks": Figure("the same layers, scanned", 2.0),
        "compiling beside a layer": Figure("one layer"),
    }.items()
}
MESHES: dict[str, tuple[tuple[int, ...], P]] = {
    "rows": ((8,), P("x", None)),
    "columns": ((8,), P(None, "x")),
    "both": ((4, 2), P("x", "y")),
}
F32 = newton_schulz(dtype=None)
MATRICES = Matrices.by_path({".*": (-2, -1)})


class Program:
    """A compiled update, and what it consists of.

    Args:
      tx: the transformation.
      params: arrays or `jax.ShapeDtypeStruct`s.
      sharding: of each of them.
    """

    def __init__(self, tx: Any, params: Any, sharding: NamedSharding) -> None:
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params
        )
        state = jax.eval_shape(tx.init, placed)._replace(mu=placed)
        start = time.process_time()
        update = jax.jit(lambda grads, state: tx.update(grads, state), donate_argnums=(0, 1))
        self.compiled = update.lower(placed, state).compile()
        self.compiling = time.process_time() - start
        self.counts = counts(self.compiled)
        moved = read_collectives(self.compiled)
        self.collectives = sum(row.count for row in moved)
        self.bytes = sum(row.count * math.prod(row.shape) * 4 for row in moved)
        self._init, self._sharding, self._shapes = tx.init, sharding, params

    def start(self) -> Any:
        """Returns a function that makes one step with state and gradients of its own."""

        def ones() -> Any:
            return jax.tree.map(
                lambda x: jnp.ones(x.shape, x.dtype, device=self._sharding), self._shapes
            )

        carried = [ones(), self._init(ones())]

        def step() -> Any:
            carried[:] = self.compiled(*carried)
            return carried[0]

        return step


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument("--layers", type=int, help="24, or 16 with --quick")
    parser.add_argument("--side", type=int, help="width: 256, or 64 with --quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compilations", type=int, default=3, help="1 with --quick")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of every layout."""
    layers = options.layers or (16 if options.quick else 24)
    side = options.side or (64 if options.quick else 256)
    for name, (shape, spec) in MESHES.items():
        mesh = jax.make_mesh(
            shape, ("x", "y")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape)
        )
        yield from measure_layout(name, NamedSharding(mesh, spec), layers, side, options)


def decoder(layers: int, side: int) -> dict[str, Any]:
    """Returns the shapes of the matrices."""
    shapes = {"q": (side, side), "wi": (side, 4 * side), "wo": (4 * side, side)}
    return {
        f"layer_{i:02}/{name}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def measure_layout(
    name: str, sharding: NamedSharding, layers: int, side: int, options: argparse.Namespace
) -> Iterator[Row]:
    """Yields the rows of one layout."""
    params, size = decoder(layers, side), 3 * layers

    def program(params: Any, sharding: NamedSharding = sharding) -> tuple[Any, Program]:
        plan = plan_matrices(params, sharding, sharding.mesh, MATRICES, fn=F32)
        return plan, Program(scale_by_muon(plan=plan), params, sharding)

    program(decoder(1, side))  # warms up
    stacks = {
        path.partition("/")[2]: jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype)
        for path, leaf in decoder(1, side).items()
    }
    in_stacks = NamedSharding(sharding.mesh, P(None, *sharding.spec))
    dims = jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)
    compiling: dict[str, list[float]] = {}
    for _ in range(1 if options.quick else options.compilations):
        theirs = Program(contrib.scale_by_muon(weight_dimension_numbers=dims), params, sharding)
        plan, ours = program(params)
        made = {
            "ours": ours,
            "Optax": theirs,
            "stacks": program(stacks, in_stacks)[1],
            "a layer": program(decoder(1, side))[1],
        }
        for what, one in made.items():
            compiling.setdefault(what, []).append(one.compiling)
    plan.check(ours.compiled, exclusive=True)
    part = sum(x.size for x in params.values()) * 4 / 8
    ideal = sum(group.ideal_flops for group in plan.groups)

    def row(what: str, mine: float, other: float) -> Row:
        return counted(f"{what}, {name}", mine, other, size=size)

    yield row("collectives beside Optax", ours.collectives, theirs.collectives)
    yield row("collectives", ours.collectives, 2 * len(plan.groups))
    yield row("bytes beside Optax", ours.bytes, theirs.bytes)
    yield row("bytes", ours.bytes, 2 * part)
    yield row("operations beside Optax", ours.counts.flops, theirs.counts.flops)
    yield row("operations", ours.counts.flops, ideal)
    yield row("temporaries beside Optax", ours.counts.temporaries, theirs.counts.temporaries)
    yield row("temporaries", ours.counts.temporaries, plan.temp_bytes)
    for what in ("Optax", "stacks", "a layer"):
        figure = f"compiling beside {what}, {name}"
        yield timed(figure, compiling["ours"], compiling[what], size=size)
    times = interleave({"ours": ours.start(), "theirs": theirs.start()}, options.rounds)
    yield timed(f"step, {name}", times["ours"], times["theirs"], size=size)


if __name__ == "__main__":
    main(__doc__, FIGURES, measure, arguments, devices=8)
