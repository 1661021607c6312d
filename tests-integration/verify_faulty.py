"""Training steps with a fault planted in them: `verify` must find it, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from verify_moves import (
    LAYER_MOVES,
    LAYER_REDUCTIONS,
    MOVES,
    REDUCTIONS,
    by_all_to_all,
    by_gather,
    by_masked_layers,
    laid,
    moving,
)
from verify_recipes import (
    F32,
    LAYERS,
    MOMENTUM,
    P,
    Program,
    Recipe,
    Tree,
    both,
    layers_loss,
    shapes_of,
)
from verify_steps import (
    ADAM,
    BF16,
    DECODER_ZERO,
    FACTORS,
    FSDP,
    FSDP_TP,
    all_gather,
    asking,
    bucketed,
    by_hand,
    by_layer,
    cast_state,
    decoder,
    gather_and_add,
    gather_and_sum,
    gather_halves_and_sum,
    layer_by_layer,
    letting_xla_decide,
    micro_batched,
    multi_steps,
    over,
    scaled_gather,
    several_steps,
    whole_update,
)


def gathers(*paths: str) -> frozenset[tuple[str, str | None]]:
    return frozenset(("state gather", path) for path in paths)


STATE_W = "1/0/trace/w"
Move = Callable[[jax.Array, Mesh], Any]


def planted_moves() -> list[Program]:
    """Every move, of the old state and of the new."""
    return planted(MOVES, LAYER_MOVES)


def planted(moves: Mapping[str, Move], layer_moves: Mapping[str, Move]) -> list[Program]:
    found = gathers(STATE_W)
    programs = []
    for name, move in moves.items():
        for when in ("before", "after"):
            hook: dict[str, Any] = {when: moving("w", move)}
            recipe = Recipe(**hook)
            programs.append(Program(f"{name}_{when}", recipe, finds=found))
    stacked = {"w": P(None, "data")}
    for name, move in layer_moves.items():
        for when in ("before", "after"):
            hook = {when: moving("w", move)}
            recipe = Recipe(shapes=LAYERS, loss=layers_loss, state=stacked, **hook)
            programs.append(Program(f"layers_{name}_{when}", recipe, finds=found))
    return programs


def errors(kind: str, *paths: str) -> frozenset[tuple[str, str | None]]:
    return frozenset((kind, path) for path in paths)


# XLA for GPUs and TPUs sees that what is gathered only to be sliced need not be gathered.
_UNDONE = (
    "gather_before|(halves|quarters|layers_loop|layers_counted_loop)_(before|after)"
    "|(grid|fsdp_tp)_(one_axis|other_axis)|fsdp_tp_after|pods|layers_on_devices|layers_fsdp"
)
_UNDONE_BY = {"gpu": _UNDONE, "tpu": f"{_UNDONE}|adam_nu"}


def is_undone(name: str, platform: str) -> bool:
    """Whether the compiler takes a fault out of the program."""
    return platform in _UNDONE_BY and re.fullmatch(_UNDONE_BY[platform], name) is not None


def averaged_moments(state: Tree, mesh: Mesh) -> Tree:
    """All moments in one `pmean`."""

    def mean(moments: Tree) -> Tree:
        return jax.lax.pmean(moments, "data")

    moments = (state[0].mu, state[0].nu)
    specs = jax.tree.map(lambda _: P("data"), moments)
    mapped: Any = jax.shard_map(mean, mesh=mesh, in_specs=(specs,), out_specs=specs)
    mu, nu = mapped(moments)
    return (state[0]._replace(mu=mu, nu=nu), *state[1:])


ALL_MOMENTS = gathers("1/0/mu/w", "1/0/mu/b", "1/0/nu/w", "1/0/nu/b")
EACH = REDUCTIONS["average"]
STACKED = {"shapes": LAYERS, "loss": layers_loss, "state": {"w": P(None, "data")}}
GRID_ZERO = {"w": P("data", "model"), "b": P("data")}
FAULTY: list[Program] = [
    *planted_moves(),
    # shards that are summed over devices
    *planted(REDUCTIONS, LAYER_REDUCTIONS),
    Program("average_all_before", Recipe(tx=ADAM, before=averaged_moments), finds=ALL_MOMENTS),
    Program("average_all_after", Recipe(tx=ADAM, after=averaged_moments), finds=ALL_MOMENTS),
    Program("average_fsdp", Recipe(**both(FSDP), after=moving("w", EACH)), finds=gathers(STATE_W)),
    Program(
        "average_several_steps",
        several_steps(Recipe(after=moving("w", EACH))),
        finds=gathers(STATE_W),
    ),
    Program(
        "average_accumulator",
        Recipe(
            tx=multi_steps(3),
            after=lambda s, mesh: s._replace(acc_grads=moving("w", EACH)(s.acc_grads, mesh)),
        ),
        finds=gathers("1/acc_grads/w"),
    ),
    # other places in the state
    Program(
        "adam_nu",
        Recipe(tx=ADAM, before=moving("w", MOVES["gather_rows"])),
        finds=gathers("1/0/mu/w", "1/0/nu/w"),
    ),
    Program(
        "bias", Recipe(before=moving("b", MOVES["gather_slices"])), finds=gathers("1/0/trace/b")
    ),
    Program(
        "accumulator",
        Recipe(
            tx=multi_steps(3),
            before=lambda s, mesh: s._replace(
                acc_grads=moving("w", by_all_to_all)(s.acc_grads, mesh)
            ),
        ),
        finds=gathers("1/acc_grads/w"),
    ),
    Program(
        "adafactor_momentum_gathered",
        Recipe(
            tx=optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9),
            place_state=FACTORS,
            before=lambda s, mesh: jax.tree.map(
                lambda x: MOVES["gather_slices"](x, mesh) if x.shape == (256, 512) else x, s
            ),
        ),
        finds=gathers("1/4/ema/w"),
    ),
    Program("scaled_gather", Recipe(before=scaled_gather), finds=gathers(STATE_W)),
    Program("bucket", bucketed(True), finds=gathers(STATE_W, "1/0/trace/b")),
    Program("whole_update", whole_update(), finds=gathers("1/0/w", "1/0/b", "1/1/w", "1/1/b")),
    # other layouts
    Program(
        "fsdp_before",
        Recipe(**both(FSDP), before=moving("w", by_all_to_all)),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_after", Recipe(**both(FSDP), after=moving("w", by_all_to_all)), finds=gathers(STATE_W)
    ),
    Program(
        "fsdp_there",
        Recipe(**both(FSDP), before=moving("w", over(None, "data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_one_axis",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over("data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_other_axis",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over(None, "model"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_both_axes",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over())),
        finds=gathers(STATE_W),
    ),
    Program(
        "grid_swapped",
        Recipe("grid", {}, GRID_ZERO, before=moving("w", over("model", "data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_tp_one_axis",
        Recipe("grid", **both(FSDP_TP), before=moving("w", over(None, "model"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_tp_after",
        Recipe("grid", **both(FSDP_TP), after=moving("w", over("data"))),
        finds=gathers(STATE_W),
    ),
    Program(
        "fsdp_tp_order",
        Recipe(
            "grid", **both({"w": P(("data", "model"))}), after=moving("w", over(("model", "data")))
        ),
        finds=gathers(STATE_W),
    ),
    Program(
        "pods",
        Recipe(
            "cube",
            {"w": P("data", "model")},
            {"w": P(("data", "pod"), "model")},
            before=moving("w", over("data", "model")),
        ),
        finds=gathers(STATE_W),
    ),
    # scanned layers
    Program(
        "layers_on_devices",
        Recipe(**{**STACKED, "state": {"w": P("data")}}, before=moving("w", by_gather)),
        finds=gathers(STATE_W),
    ),
    Program(
        "layers_on_devices_one_by_one",
        Recipe(**{**STACKED, "state": {"w": P("data")}}, tx=by_layer(MOMENTUM)),
        finds=gathers(STATE_W),
    ),
    Program(
        "layers_all_to_all",
        Recipe(
            **STACKED,
            before=moving(
                "w", lambda x, mesh: laid(layer_by_layer(None, "data")(x, mesh), mesh, None, "data")
            ),
        ),
        finds=gathers(STATE_W),
    ),
    Program(
        "layers_fsdp",
        Recipe(
            shapes=LAYERS,
            loss=layers_loss,
            **both({"w": P(None, "data")}),
            before=moving("w", layer_by_layer()),
        ),
        finds=gathers(STATE_W),
    ),
    Program(
        "several_steps_gather",
        several_steps(Recipe(before=moving("w", MOVES["gather_slices"]))),
        finds=gathers(STATE_W),
    ),
    Program(
        "several_steps_loop",
        several_steps(Recipe(**STACKED, after=moving("w", LAYER_MOVES["gather_slices"]))),
        finds=gathers(STATE_W),
    ),
    Program(
        "several_steps_all_to_all",
        several_steps(Recipe(**both(FSDP), after=moving("w", by_all_to_all))),
        finds=gathers(STATE_W),
    ),
    Program(
        "decoder_loop",
        decoder(state=DECODER_ZERO, tx=MOMENTUM, before=moving("up", LAYER_MOVES["gather_slices"])),
        finds=gathers("1/0/trace/up"),
    ),
    # not as asked
    Program(
        "comes_out_whole",
        Recipe(out_state={}, donate=()),
        finds=errors("sharding", STATE_W, "1/0/trace/b") | gathers(STATE_W, "1/0/trace/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "comes_out_elsewhere",
        Recipe(out_state={"w": P(None, "data"), "b": P("data")}, donate=()),
        finds=errors("sharding", STATE_W) | gathers(STATE_W),
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
        letting_xla_decide(Recipe(donate=())),
        finds=errors("sharding", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_changes",
        Recipe(after=cast_state(jnp.bfloat16), donate=(0,)),
        finds=errors("dtype", STATE_W),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_widens",
        Recipe(
            tx=optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
            after=cast_state(F32),
            donate=(0,),
        ),
        finds=errors("dtype", STATE_W),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_of_params",
        Recipe(shapes=BF16, update_dtype=F32, donate=(1,)),
        finds=errors("dtype", "0/w", "0/b"),
        warns=frozenset({"donation"}),
    ),
    Program(
        "dtype_not_asked",
        asking(Recipe(tx=optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16)), F32),
        finds=errors("dtype", STATE_W, "1/0/trace/b"),
    ),
    Program(
        "dtype_asked_for_less",
        asking(Recipe(), jnp.bfloat16),
        finds=errors("dtype", STATE_W, "1/0/trace/b"),
    ),
]
# Of these no texts are stored.
MANY_LAYERS = {**STACKED, "shapes": shapes_of(w=(16, 256, 256))}
SUMMED: dict[str, Any] = {
    "options": {"gradients": "reduce-scatter"},
    "finds": errors("gradient all-reduce", STATE_W),
}
GATHERED: dict[str, Any] = {
    "options": {"gradients": "reduce-scatter"},
    "finds": errors("gradient all-reduce", STATE_W, "1/0/trace/b"),
}
FAULTY_ON_CPUS: list[Program] = [
    # gradients that are gathered in full, and summed on each device
    *(
        Program(function.__name__, by_hand(function, all_gather), **GATHERED)
        for function in (gather_and_sum, gather_and_add, gather_halves_and_sum)
    ),
    Program(
        "layers_by_mask",
        Recipe(**MANY_LAYERS, before=moving("w", by_masked_layers)),
        finds=gathers(STATE_W),
    ),
    Program("layers_summed", Recipe(**STACKED), **SUMMED),
    Program("several_steps_layers_summed", several_steps(Recipe(**STACKED)), **SUMMED),
    Program(
        "micro_batches_layers_summed",
        Recipe(
            **STACKED,
            batch=jax.ShapeDtypeStruct((4, 64, 256), F32),
            batch_spec=P(None, "data"),
            gradients=micro_batched(True),
        ),
        **SUMMED,
    ),
]
WASTEFUL: list[Program] = [
    Program("not_donated", Recipe(donate=()), warns=frozenset({"donation"})),
    Program("state_not_donated", Recipe(donate=(0,)), warns=frozenset({"donation"})),
    Program("params_not_donated", Recipe(donate=(1,)), warns=frozenset({"donation"})),
]
