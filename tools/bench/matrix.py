"""What Muon on a mesh costs as planned, next to `optax.contrib.muon` as the compiler has it.

    hatch run dev:bench --only matrix

Updates of a decoder's matrices on eight devices, in float32; on a CPU the devices are virtual, and
times are those of all of them together. Limits: two collectives for each group of the plan; bytes
of results of twice a device's part of the matrices; operations of the ideal; temporaries of
`max_group_bytes`; compiling unrolled layers in twice the time of the same ones as stacks.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax.contrib
from _common import Counts, Row, counted, interleave, timed
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_matrix import Matrices, newton_schulz, plan_matrices, scale_by_muon
from opt_partition import read_collectives

contrib: Any = optax.contrib
DEVICES = 8
OPTAX = "optax.contrib.muon"
MESHES: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
    "rows": ((8,), ("x", None)),
    "columns": ((8,), (None, "x")),
    "both": ((4, 2), ("x", "y")),
}


class Program:
    """A compiled update of shapes that lie as they should, and what it consists of."""

    def __init__(self, tx: Any, shapes: Any, sharding: NamedSharding) -> None:
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )
        state = jax.eval_shape(tx.init, placed)._replace(mu=placed)
        start = time.process_time()
        update = jax.jit(lambda grads, state: tx.update(grads, state), donate_argnums=(0, 1))
        self.compiled: Any = update.lower(placed, state).compile()
        self.compiling = time.process_time() - start
        self.counts = Counts(self.compiled)
        moved = read_collectives(self.compiled)
        self.collectives = sum(row.count for row in moved)
        self.bytes = sum(row.count * math.prod(row.shape) * 4 for row in moved)
        self._init, self._shapes = tx.init, placed

    def start(self) -> Any:
        """Returns a function that makes one step with state and gradients of its own."""

        def ones() -> Any:
            return jax.tree.map(lambda x: jnp.ones(x.shape, device=x.sharding), self._shapes)

        carried = [ones(), self._init(ones())]

        def step() -> Any:
            carried[:] = self.compiled(*carried)
            return carried[0]

        return step


def decoder(layers: int, side: int, *stacked: int) -> dict[str, Any]:
    """Returns the shapes of the matrices."""
    shapes = {"q": (side, side), "wi": (side, 4 * side), "wo": (4 * side, side)}
    return {
        f"layer_{i:02}/{name}": jax.ShapeDtypeStruct((*stacked, *shape), jnp.float32)
        for i in range(layers)
        for name, shape in shapes.items()
    }


def measure(quick: bool) -> Iterator[Row]:
    """Yields the rows of every layout."""
    layers, side = (16, 64) if quick else (24, 256)
    for name, (shape, spec) in MESHES.items():
        kinds = (AxisType.Auto,) * len(shape)
        mesh = jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=kinds)
        yield from measure_layout(name, mesh, spec, layers, side, 1 if quick else 3)


def measure_layout(
    name: str, mesh: Any, spec: tuple[Any, ...], layers: int, side: int, compilations: int
) -> Iterator[Row]:
    """Yields the rows of one layout."""
    params, size = decoder(layers, side), 3 * layers
    flat, stacked = (NamedSharding(mesh, PartitionSpec(*at, *spec)) for at in ((), (None,)))
    dims = jax.tree.map(lambda _: contrib.MuonDimensionNumbers(), params)
    matrices, fn = Matrices.by_path({".*": (-2, -1)}), newton_schulz(dtype=None)

    def ours(shapes: Any, sharding: NamedSharding = flat) -> tuple[Any, Program]:
        plan = plan_matrices(shapes, sharding, mesh, matrices, fn=fn)
        return plan, Program(scale_by_muon(plan=plan), shapes, sharding)

    ours(decoder(1, side))  # warms up
    one, stacks = "one layer", "the same layers, scanned"
    compiling: dict[str, list[float]] = {}
    for _ in range(compilations):
        theirs = Program(contrib.scale_by_muon(weight_dimension_numbers=dims), params, flat)
        plan, found = ours(params)
        others = {one: decoder(1, side), stacks: decoder(1, side, layers)}
        made = {"ours": found, OPTAX: theirs, one: ours(others[one])[1]}
        made[stacks] = ours(others[stacks], stacked)[1]
        for what, program in made.items():
            compiling.setdefault(what, []).append(program.compiling)
    plan.check(found.compiled, exclusive=True)
    part = sum(x.size for x in params.values()) * 4 / 8
    ideal = sum(group.ideal_flops for group in plan.groups)
    mine, other = found.counts, theirs.counts
    for what, a, b, peer, c, limit in (
        (
            "collectives",
            found.collectives,
            theirs.collectives,
            "2 a group",
            2 * len(plan.groups),
            1,
        ),
        ("bytes", found.bytes, theirs.bytes, "2 x matrices / devices", 2 * part, 1),
        ("operations", mine.flops, other.flops, "ideal", ideal, 1.05),
        ("temporaries", mine.temporaries, other.temporaries, "planned", plan.temp_bytes, 1.1),
    ):
        yield counted(f"{what}, {name}", a, OPTAX, b, size=size)
        yield counted(f"{what}, {name}", a, peer, c, limit=limit, size=size)
    limits = {OPTAX: None, stacks: 2.0, one: None}
    for peer, most in limits.items():
        figure = f"compiling, {name}"
        yield timed(figure, compiling["ours"], peer, compiling[peer], limit=most, size=size)
    times = interleave({"ours": found.start(), OPTAX: theirs.start()}, 5)
    yield timed(f"step, {name}", times["ours"], OPTAX, times[OPTAX], size=size)
