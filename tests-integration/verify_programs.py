"""Training steps for `verify`: with a fault planted in them, wasteful, and healthy."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import verify_steps as v
from jax.sharding import Mesh
from verify_steps import (
    ADAM,
    F32,
    FSDP,
    FSDP_TP,
    LAYERS,
    TP,
    Meshes,
    P,
    Program,
    Recipe,
    Step,
    both,
    by_hand,
    by_shape,
    decoder,
    laid,
    layers,
    mine,
    moving,
    several_steps,
)

# Ways to move a sharded array to other devices and back, each as wasteful as the next.


def by_all_to_all(x: jax.Array, mesh: Mesh) -> Any:
    """To another dimension and back."""
    return laid(laid(x, mesh, None, "data"), mesh, "data")


def by_loop(x: jax.Array, mesh: Mesh) -> Any:
    """Layer by layer."""
    return jax.lax.map(lambda layer: v.whole(layer, mesh), x)


def on_shards(function: Callable[[jax.Array], Any], *spec: Any) -> Callable[[jax.Array, Mesh], Any]:
    """A move written for the part of an array that a device has along `data`."""

    def move(x: jax.Array, mesh: Mesh) -> Any:
        mapped: Any = jax.shard_map(
            function, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec), check_vma=False
        )
        return mapped(x)

    return move


def ring_gather_in_a_loop(part: jax.Array) -> Any:
    """All parts, by a ring in a loop that puts them together on the way."""

    def turn(n: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        full, passing = carry
        passing = jax.lax.ppermute(passing, "data", v.RING)
        start = (jax.lax.axis_index("data") - n - 1) % 8 * part.shape[0]
        return jax.lax.dynamic_update_slice_in_dim(full, passing, start, 0), passing

    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype)
    start = jax.lax.axis_index("data") * part.shape[0]
    full = jax.lax.dynamic_update_slice_in_dim(full, part, start, 0)
    return jax.lax.fori_loop(0, 7, turn, (full, part))[0]


def _ring_loop(part: jax.Array) -> Any:
    return mine(ring_gather_in_a_loop(part), part.shape[0])


def _masked_sum(part: jax.Array) -> Any:
    """The same with a mask v.over copies of the shard."""
    is_mine = jnp.arange(8)[:, None, None] == jax.lax.axis_index("data")
    full = jnp.where(is_mine, part[None], 0.0).reshape(-1, part.shape[1])
    return mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _scattered_sum(part: jax.Array) -> Any:
    """The same with indices."""
    rows = jax.lax.axis_index("data") * part.shape[0] + jnp.arange(part.shape[0])
    full = jnp.zeros((8 * part.shape[0], *part.shape[1:]), part.dtype).at[rows].set(part)
    return mine(jax.lax.optimization_barrier(jax.lax.psum(full, "data")), part.shape[0])


def _gather_slices(part: jax.Array) -> Any:
    return mine(
        jax.lax.optimization_barrier(jax.lax.all_gather(part, "data", tiled=True)), part.shape[0]
    )


def _exchange(part: jax.Array) -> Any:
    """To other columns of all rows, and back."""
    there = jax.lax.all_to_all(part, "data", 1, 0, tiled=True)
    there = jax.lax.optimization_barrier(there)
    return jax.lax.all_to_all(there, "data", 0, 1, tiled=True)


def _gather_if(part: jax.Array) -> Any:
    large = jax.lax.pmax(jnp.max(part), "data") > 1
    return jax.lax.cond(large, _gather_slices, lambda x: x, part)


def each_layer(function: Callable[[jax.Array], Any]) -> Callable[[jax.Array, Mesh], Any]:
    """A move of the parts that a device has of each of the stacked layers, one after the other."""
    return on_shards(lambda parts: jax.lax.map(function, parts), None, "data")


MOVES: dict[str, Callable[[jax.Array, Mesh], Any]] = {
    "gather": v.whole,
    "all_to_all": by_all_to_all,
    "ring_in_a_loop": on_shards(_ring_loop, "data"),
    "masked_sum": on_shards(_masked_sum, "data"),
    "scattered_sum": on_shards(_scattered_sum, "data"),
    "gather_slices": on_shards(_gather_slices, "data"),
    "exchange": on_shards(_exchange, "data"),
    "gather_if": on_shards(_gather_if, "data"),
}
LAYER_MOVES: dict[str, Callable[[jax.Array, Mesh], Any]] = {
    "loop": by_loop,
    "gather_slices": each_layer(_gather_slices),
    "exchange": each_layer(_exchange),
}


def _average(part: jax.Array) -> Any:
    """Each device's shard becomes the mean of all shards."""
    return jax.lax.pmean(part, "data")


def _average_rows(part: jax.Array) -> Any:
    return jax.lax.map(_average, part)


def _average_often(part: jax.Array) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, x: _average(x), part)


def _average_if(part: jax.Array) -> Any:
    large = jax.lax.pmax(jnp.max(part), "data") > 1
    return jax.lax.cond(large, _average, lambda x: x, part)


REDUCTIONS: dict[str, Callable[[jax.Array, Mesh], Any]] = {
    "average": on_shards(_average, "data"),
    "average_rows": on_shards(_average_rows, "data"),
    "average_often": on_shards(_average_often, "data"),
    "average_if": on_shards(_average_if, "data"),
}
LAYER_REDUCTIONS = {"average": each_layer(_average)}


# With a fault planted in them: `verify` must find it, and nothing else.


def gathers(*paths: str) -> frozenset[tuple[str, str | None]]:
    return frozenset(("state gather", path) for path in paths)


STATE_W = "1/0/trace/w"
COLUMNS = {"w": P(None, "data")}  # of stacked layers
Move = Callable[[jax.Array, Mesh], Any]


def planted(moves: Mapping[str, Move], layer_moves: Mapping[str, Move]) -> list[Program]:
    programs = []
    for when in ("before", "after"):
        for name, move in moves.items():
            hook: dict[str, Any] = {when: moving("w", move)}
            programs.append(moved(f"{name}_{when}", Recipe(**hook)))
        for name, move in layer_moves.items():
            hook = {when: moving("w", move)}
            programs.append(moved(f"layers_{name}_{when}", layers(state=COLUMNS, **hook)))
    return programs


def moved(name: str, build: Callable[[Meshes], Step], *paths: str) -> Program:
    """A step in which state of these paths is moved; without any, the momentum of `w`."""
    return Program(name, build, finds=gathers(*paths or (STATE_W,)))


def errors(kind: str, *paths: str) -> frozenset[tuple[str, str | None]]:
    return frozenset((kind, path) for path in paths)


# XLA for GPUs and TPUs sees that what is gathered only to be sliced need not be gathered.
_UNDONE = "gather_before|layers_loop_(before|after)|fsdp_tp_after|pods"


def is_undone(name: str, platform: str) -> bool:
    """Whether the compiler takes a fault out of the program."""
    return platform != "cpu" and re.fullmatch(_UNDONE, name) is not None


EACH = REDUCTIONS["average"]
GRID_ZERO = {"w": P("data", "model"), "b": P("data")}
FAULTY: list[Program] = [
    *planted(MOVES, LAYER_MOVES),
    # shards that are summed v.over devices
    *planted(REDUCTIONS, LAYER_REDUCTIONS),
    moved("average_fsdp", Recipe(**both(FSDP), after=moving("w", EACH))),
    moved("average_several_steps", several_steps(Recipe(after=moving("w", EACH)))),
    moved(
        "average_accumulator",
        Recipe(
            tx=v.multi_steps(3),
            after=lambda s, mesh: s._replace(acc_grads=moving("w", EACH)(s.acc_grads, mesh)),
        ),
        "1/acc_grads/w",
    ),
    # other places in the state
    moved(
        "adafactor_momentum_gathered",
        Recipe(
            tx=optax.adafactor(0.001, min_dim_size_to_factor=8, momentum=0.9),
            place_state=v.FACTORS,
            before=lambda s, mesh: jax.tree.map(
                lambda x: MOVES["gather_slices"](x, mesh) if x.shape == (256, 512) else x, s
            ),
        ),
        "1/4/ema/w",
    ),
    moved("bucket", v.bucketed(True), STATE_W, "1/0/trace/b"),
    # other layouts
    moved("fsdp_after", Recipe(**both(FSDP), after=moving("w", by_all_to_all))),
    moved(
        "grid_swapped", Recipe("grid", {}, GRID_ZERO, before=moving("w", v.over("model", "data")))
    ),
    moved("fsdp_tp_after", Recipe("grid", **both(FSDP_TP), after=moving("w", v.over("data")))),
    moved(
        "pods",
        Recipe(
            "cube",
            {"w": P("data", "model")},
            {"w": P(("data", "pod"), "model")},
            before=moving("w", v.over("data", "model")),
        ),
    ),
    # scanned layers
    moved(
        "several_steps_gather", several_steps(Recipe(before=moving("w", MOVES["gather_slices"])))
    ),
    # not as asked
    Program(
        "comes_out_whole",
        Recipe(out_state={}, donate=()),
        finds=errors("sharding", STATE_W, "1/0/trace/b") | gathers(STATE_W, "1/0/trace/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "params_come_out_sharded",
        Recipe(out_params=FSDP, donate=()),
        finds=errors("sharding", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "xla_decides",
        v.letting_xla_decide(Recipe(donate=())),
        finds=errors("sharding", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_changes",
        Recipe(after=v.cast_state(jnp.bfloat16), donate=(0,)),
        finds=errors("dtype", STATE_W),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_of_params",
        Recipe(shapes=v.BF16, update_dtype=F32, donate=(1,)),
        finds=errors("dtype", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
]
# Of it no text is stored.
LAYERS_SUMMED = Program(
    "layers_summed",
    layers(state=COLUMNS),
    {"gradients": "reduce-scatter"},
    errors("gradient all-reduce", STATE_W),
)
WASTEFUL: list[Program] = [
    Program("not_donated", Recipe(donate=()), warns=frozenset({"donation"})),
    Program("state_not_donated", Recipe(donate=(0,)), warns=frozenset({"donation"})),
]


# Healthy: `verify` must find nothing wrong with them.

CONTRIB: Any = optax.contrib


def in_micro_batches(gradients: Any) -> Recipe:
    batch = jax.ShapeDtypeStruct((4, 64, 256), F32)
    return Recipe(tx=ADAM, batch=batch, batch_spec=P(None, "data"), gradients=gradients)


ANY = {"state_gathers": "any"}
HEALTHY: list[Program] = [
    Program("zero1_adamw", Recipe(tx=ADAM)),
    Program("zero1_clipped", Recipe(tx=v.clipped(ADAM))),
    Program("zero1_bf16_params", Recipe(tx=optax.adamw(1e-3, mu_dtype=F32), shapes=v.BF16)),
    Program("zero1_schedule_free", Recipe(tx=CONTRIB.schedule_free_adamw(1e-3))),
    Program("zero1_over_tp", Recipe("grid", TP, {"w": P("data", "model"), "b": P("model")}, ADAM)),
    Program(
        "zero1_over_tp_other_order",
        Recipe("grid", TP, {"w": P(None, ("data", "model")), "b": P(("data", "model"))}, ADAM),
    ),
    Program(
        "zero1_both_axes", Recipe("grid", {}, {"w": P(("data", "model")), "b": P("data")}, ADAM)
    ),
    Program("zero1_sum_and_gather", by_hand(v.sum_and_slice, v.all_gather)),
    Program("zero1_ring_in_a_loop", by_hand(v.sum_scatter, ring_gather_in_a_loop)),
    Program("zero1_layers", layers(tx=ADAM, state={"w": P(None, "data")})),
    Program("zero1_layers_on_devices", layers(tx=ADAM, state={"w": P("data")})),
    Program("zero2_adamw", Recipe(tx=ADAM, on_grads=v.constrain)),
    Program("fsdp_adamw", Recipe(tx=ADAM, **both(FSDP))),
    Program("fsdp_clipped", Recipe(tx=v.clipped(ADAM), **both(FSDP))),
    Program(
        "fsdp_layers_remat",
        Recipe(
            shapes=LAYERS,
            loss=functools.partial(v.layers_loss, remat=True),
            tx=ADAM,
            **both({"w": P(None, None, "data")}),
        ),
    ),
    Program("fsdp_tp_adamw", Recipe("grid", tx=ADAM, **both(FSDP_TP))),
    Program(
        "hsdp",
        Recipe("cube", tx=ADAM, batch_spec=P(("pod", "data")), **both({"w": P("data", "model")})),
    ),
    Program("zero1_multi_steps", Recipe(tx=v.multi_steps(3))),
    Program("zero1_micro_batches", in_micro_batches(v.micro_batched(True))),
    Program("zero1_micro_batches_deferred", in_micro_batches(v.micro_batched(False))),
    Program("adafactor_zero1", Recipe(tx=v.FACTORED, place_state=v.FACTORS)),
    Program(
        "adafactor_fsdp_tp",
        Recipe(
            "grid",
            FSDP_TP,
            tx=v.FACTORED,
            place_state=by_shape(
                {(256, 512): P("data", "model"), (256,): P("data"), (512,): P("model")}
            ),
        ),
    ),
    Program(
        "adafactor_momentum",
        Recipe(
            tx=optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9), place_state=v.FACTORS
        ),
    ),
    Program("sm3", Recipe(tx=optax.sm3(0.1), place_state=v.FACTORS)),
    Program(
        "muon",
        Recipe(
            "grid",
            FSDP_TP,
            tx=CONTRIB.muon(1e-3),
            place_state=by_shape({(256, 512): P("data", "model"), (512,): P("model")}),
        ),
        options=ANY,
    ),
    Program(
        "lbfgs",
        Recipe(
            tx=optax.lbfgs(linesearch=None, memory_size=3),
            params=FSDP,
            place_state=by_shape(
                {
                    (256, 512): P("data"),
                    (512,): P("data"),
                    (3, 256, 512): P(None, "data"),
                    (3, 512): P(None, "data"),
                }
            ),
        ),
    ),
    Program(
        "fsdp_other_order",
        Recipe("grid", {"w": P(("model", "data"))}, {"w": P(("data", "model"))}, ADAM),
    ),
    Program(
        "moe_zero1",
        Recipe(
            "grid",
            {"up": P("data"), "down": P("data")},
            {"up": P("data", "model"), "down": P("data", "model"), "router": P("data")},
            ADAM,
            loss=v.moe_loss,
            shapes=v.MOE,
        ),
    ),
    Program("decoder_fsdp_tp", decoder(mesh="grid", **both(v.DECODER_TP))),
    Program("decoder_zero1", decoder(state=v.DECODER_ZERO)),
    Program(
        "decoder_adafactor",
        decoder(
            mesh="grid",
            params=v.DECODER_TP,
            tx=v.FACTORED,
            place_state=by_shape({(512, 256): P(None, "model"), (256,): P("model")}),
        ),
    ),
    Program("several_steps_zero1", several_steps(Recipe(tx=ADAM))),
    Program("zero1_bucket", v.bucketed(False)),
]
# XLA sums the gradients of these in whole, though each device uses a part; so it is said.
_SUMMED = "zero1_sum_and_gather|zero1_layers_on_devices"
_SUMMED_BY = {"gpu": _SUMMED, "tpu": f"{_SUMMED}|decoder_zero1"}


def is_summed(name: str, platform: str) -> bool:
    """Whether the compiler all-reduces gradients that a reduce-scatter would do for."""
    return platform in _SUMMED_BY and re.fullmatch(_SUMMED_BY[platform], name) is not None
