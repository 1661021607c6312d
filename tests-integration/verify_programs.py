"""Training steps for `verify`: with a fault planted in them, wasteful, and healthy."""

from __future__ import annotations

import functools
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
    ring_gather_in_a_loop,
)
from verify_recipes import (
    F32,
    LAYERS,
    MOMENTUM,
    Meshes,
    P,
    Program,
    Recipe,
    Step,
    Tree,
    both,
    by_shape,
    constrain,
    layers,
    layers_loss,
    shapes_of,
)
from verify_steps import (
    ADAM,
    BF16,
    DECODER_TP,
    DECODER_ZERO,
    EXPERTS,
    FACTORED,
    FACTORS,
    FSDP,
    FSDP_TP,
    GROUPS,
    MOE,
    TP,
    all_gather,
    asking,
    bucketed,
    by_hand,
    by_layer,
    cast_state,
    clipped,
    decoder,
    gather_and_add,
    gather_and_sum,
    gather_halves_and_sum,
    layer_by_layer,
    letting_xla_decide,
    micro_batched,
    moe_loss,
    multi_steps,
    over,
    placed_gather,
    ring_gather,
    scaled_gather,
    several_steps,
    sum_and_slice,
    sum_scatter,
    whole_update,
)

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


ALL_MOMENTS = ("1/0/mu/w", "1/0/mu/b", "1/0/nu/w", "1/0/nu/b")
EACH = REDUCTIONS["average"]
GRID_ZERO = {"w": P("data", "model"), "b": P("data")}
FAULTY: list[Program] = [
    *planted(MOVES, LAYER_MOVES),
    # shards that are summed over devices
    *planted(REDUCTIONS, LAYER_REDUCTIONS),
    moved("average_all_before", Recipe(tx=ADAM, before=averaged_moments), *ALL_MOMENTS),
    moved("average_all_after", Recipe(tx=ADAM, after=averaged_moments), *ALL_MOMENTS),
    moved("average_fsdp", Recipe(**both(FSDP), after=moving("w", EACH))),
    moved("average_several_steps", several_steps(Recipe(after=moving("w", EACH)))),
    moved(
        "average_accumulator",
        Recipe(
            tx=multi_steps(3),
            after=lambda s, mesh: s._replace(acc_grads=moving("w", EACH)(s.acc_grads, mesh)),
        ),
        "1/acc_grads/w",
    ),
    # other places in the state
    moved(
        "adam_nu", Recipe(tx=ADAM, before=moving("w", MOVES["gather_rows"])), "1/0/mu/w", "1/0/nu/w"
    ),
    moved("bias", Recipe(before=moving("b", MOVES["gather_slices"])), "1/0/trace/b"),
    moved(
        "accumulator",
        Recipe(
            tx=multi_steps(3),
            before=lambda s, mesh: s._replace(
                acc_grads=moving("w", by_all_to_all)(s.acc_grads, mesh)
            ),
        ),
        "1/acc_grads/w",
    ),
    moved(
        "adafactor_momentum_gathered",
        Recipe(
            tx=optax.adafactor(0.001, min_dim_size_to_factor=8, momentum=0.9),
            place_state=FACTORS,
            before=lambda s, mesh: jax.tree.map(
                lambda x: MOVES["gather_slices"](x, mesh) if x.shape == (256, 512) else x, s
            ),
        ),
        "1/4/ema/w",
    ),
    moved("scaled_gather", Recipe(before=scaled_gather)),
    moved("bucket", bucketed(True), STATE_W, "1/0/trace/b"),
    moved("whole_update", whole_update(), "1/0/w", "1/0/b", "1/1/w", "1/1/b"),
    # other layouts
    moved("fsdp_before", Recipe(**both(FSDP), before=moving("w", by_all_to_all))),
    moved("fsdp_after", Recipe(**both(FSDP), after=moving("w", by_all_to_all))),
    moved("fsdp_there", Recipe(**both(FSDP), before=moving("w", over(None, "data")))),
    moved("grid_one_axis", Recipe("grid", {}, GRID_ZERO, before=moving("w", over("data")))),
    moved(
        "grid_other_axis", Recipe("grid", {}, GRID_ZERO, before=moving("w", over(None, "model")))
    ),
    moved("grid_both_axes", Recipe("grid", {}, GRID_ZERO, before=moving("w", over()))),
    moved("grid_swapped", Recipe("grid", {}, GRID_ZERO, before=moving("w", over("model", "data")))),
    moved(
        "fsdp_tp_one_axis", Recipe("grid", **both(FSDP_TP), before=moving("w", over(None, "model")))
    ),
    moved("fsdp_tp_after", Recipe("grid", **both(FSDP_TP), after=moving("w", over("data")))),
    moved(
        "fsdp_tp_order",
        Recipe(
            "grid", **both({"w": P(("data", "model"))}), after=moving("w", over(("model", "data")))
        ),
    ),
    moved(
        "pods",
        Recipe(
            "cube",
            {"w": P("data", "model")},
            {"w": P(("data", "pod"), "model")},
            before=moving("w", over("data", "model")),
        ),
    ),
    # scanned layers
    moved("layers_on_devices", layers(state={"w": P("data")}, before=moving("w", by_gather))),
    moved("layers_on_devices_one_by_one", layers(state={"w": P("data")}, tx=by_layer(MOMENTUM))),
    moved(
        "layers_all_to_all",
        layers(
            state=COLUMNS,
            before=moving(
                "w", lambda x, mesh: laid(layer_by_layer(None, "data")(x, mesh), mesh, None, "data")
            ),
        ),
    ),
    moved(
        "layers_fsdp", layers(**both({"w": P(None, "data")}), before=moving("w", layer_by_layer()))
    ),
    moved(
        "several_steps_gather", several_steps(Recipe(before=moving("w", MOVES["gather_slices"])))
    ),
    moved(
        "several_steps_loop",
        several_steps(layers(state=COLUMNS, after=moving("w", LAYER_MOVES["gather_slices"]))),
    ),
    moved(
        "several_steps_all_to_all",
        several_steps(Recipe(**both(FSDP), after=moving("w", by_all_to_all))),
    ),
    moved(
        "decoder_loop",
        decoder(state=DECODER_ZERO, tx=MOMENTUM, before=moving("up", LAYER_MOVES["gather_slices"])),
        "1/0/trace/up",
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
MANY_LAYERS = shapes_of(w=(16, 256, 256))
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
    moved(
        "layers_by_mask",
        layers(shapes=MANY_LAYERS, state=COLUMNS, before=moving("w", by_masked_layers)),
    ),
    Program("layers_summed", layers(state=COLUMNS), **SUMMED),
    Program("several_steps_layers_summed", several_steps(layers(state=COLUMNS)), **SUMMED),
    Program(
        "micro_batches_layers_summed",
        layers(
            state=COLUMNS,
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


# Healthy: `verify` must find nothing wrong with them.

CONTRIB: Any = optax.contrib


def in_micro_batches(gradients: Any) -> Recipe:
    batch = jax.ShapeDtypeStruct((4, 64, 256), F32)
    return Recipe(tx=ADAM, batch=batch, batch_spec=P(None, "data"), gradients=gradients)


ANY = {"state_gathers": "any"}
HEALTHY: list[Program] = [
    Program("replicated", Recipe(tx=ADAM, state={})),
    Program("zero1_adamw", Recipe(tx=ADAM)),
    Program("zero1_momentum", Recipe()),
    Program("zero1_lion", Recipe(tx=optax.lion(1e-3))),
    Program("zero1_lamb", Recipe(tx=optax.lamb(1e-3))),
    Program("zero1_clipped", Recipe(tx=clipped(ADAM))),
    Program("zero1_clipped_by_unit", Recipe(tx=optax.chain(optax.adaptive_grad_clip(0.1), ADAM))),
    Program("zero1_columns", Recipe(tx=ADAM, state={"w": P(None, "data"), "b": P("data")})),
    Program("zero1_bf16_params", Recipe(tx=optax.adamw(1e-3, mu_dtype=F32), shapes=BF16)),
    Program("zero1_injected", Recipe(tx=optax.inject_hyperparams(optax.adamw)(1e-3))),
    Program("zero1_schedule", Recipe(tx=optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))),
    Program("zero1_ema_of_updates", Recipe(tx=optax.chain(ADAM, optax.ema(0.9)))),
    Program("zero1_groups", Recipe(tx=GROUPS)),
    Program("zero1_masked", Recipe(tx=optax.masked(ADAM, {"w": True, "b": False}))),
    Program("zero1_finite", Recipe(tx=optax.apply_if_finite(ADAM, 3))),
    Program("zero1_schedule_free", Recipe(tx=CONTRIB.schedule_free_adamw(1e-3))),
    Program("zero1_over_tp", Recipe("grid", TP, {"w": P("data", "model"), "b": P("model")}, ADAM)),
    Program(
        "zero1_over_tp_order",
        Recipe("grid", TP, {"w": P(None, ("model", "data")), "b": P(("model", "data"))}, ADAM),
    ),
    Program(
        "zero1_over_tp_other_order",
        Recipe("grid", TP, {"w": P(None, ("data", "model")), "b": P(("data", "model"))}, ADAM),
    ),
    Program("zero1_two_axes", Recipe("grid", {}, {"w": P("data", "model"), "b": P("data")}, ADAM)),
    Program(
        "zero1_both_axes", Recipe("grid", {}, {"w": P(("data", "model")), "b": P("data")}, ADAM)
    ),
    Program(
        "zero1_other_dimension",
        Recipe("grid", {"w": P("model")}, {"w": P("data", "model"), "b": P("data")}, ADAM),
    ),
    Program(
        "zero1_pods",
        Recipe(
            "cube",
            {"w": P("data", "model")},
            {"w": P(("data", "pod"), "model"), "b": P("pod")},
            ADAM,
            batch_spec=P(("pod", "data")),
        ),
    ),
    Program("zero1_scatter_and_gather", by_hand(sum_scatter, all_gather)),
    Program("zero1_sum_and_gather", by_hand(sum_and_slice, all_gather)),
    Program("zero1_ring", by_hand(sum_scatter, ring_gather)),
    Program("zero1_ring_in_a_loop", by_hand(sum_scatter, ring_gather_in_a_loop)),
    Program("zero1_placed_sum", by_hand(sum_scatter, placed_gather)),
    Program("zero1_layers", layers(tx=ADAM, state={"w": P(None, "data")})),
    Program("zero1_layers_on_devices", layers(tx=ADAM, state={"w": P("data")})),
    Program("zero1_layer_by_layer", layers(tx=by_layer(MOMENTUM), state={"w": P(None, "data")})),
    Program("zero2_adamw", Recipe(tx=ADAM, on_grads=constrain)),
    Program("zero2_layers", layers(tx=ADAM, state={"w": P(None, "data")}, on_grads=constrain)),
    Program("fsdp_adamw", Recipe(tx=ADAM, **both(FSDP))),
    Program("fsdp_clipped", Recipe(tx=clipped(ADAM), **both(FSDP))),
    Program("fsdp_lamb", Recipe(tx=optax.lamb(1e-3), **both(FSDP))),
    Program("fsdp_layers", layers(tx=ADAM, **both({"w": P(None, "data")}))),
    Program(
        "fsdp_layers_remat",
        Recipe(
            shapes=LAYERS,
            loss=functools.partial(layers_loss, remat=True),
            tx=ADAM,
            **both({"w": P(None, None, "data")}),
        ),
    ),
    Program("fsdp_layers_on_devices", layers(tx=ADAM, **both({"w": P("data")}))),
    Program("fsdp_tp_adamw", Recipe("grid", tx=ADAM, **both(FSDP_TP))),
    Program("fsdp_tp_clipped", Recipe("grid", tx=clipped(ADAM), **both(FSDP_TP))),
    Program("fsdp_pods", Recipe("cube", tx=ADAM, **both({"w": P(("pod", "data"), "model")}))),
    Program(
        "hsdp",
        Recipe("cube", tx=ADAM, batch_spec=P(("pod", "data")), **both({"w": P("data", "model")})),
    ),
    Program("tp_adamw", Recipe("grid", tx=ADAM, **both(TP))),
    Program("zero1_multi_steps", Recipe(tx=multi_steps(3))),
    Program("zero1_multi_steps_every_step", Recipe(tx=multi_steps(1))),
    Program("fsdp_multi_steps", Recipe(tx=multi_steps(3), **both(FSDP))),
    Program("zero1_multi_steps_finite", Recipe(tx=optax.apply_if_finite(multi_steps(2), 3))),
    Program("zero1_micro_batches", in_micro_batches(micro_batched(True))),
    Program("zero1_micro_batches_deferred", in_micro_batches(micro_batched(False))),
    Program("adafactor_zero1", Recipe(tx=FACTORED, place_state=FACTORS)),
    Program(
        "adafactor_fsdp_tp",
        Recipe(
            "grid",
            FSDP_TP,
            tx=FACTORED,
            place_state=by_shape(
                {(256, 512): P("data", "model"), (256,): P("data"), (512,): P("model")}
            ),
        ),
    ),
    Program(
        "adafactor_momentum",
        Recipe(
            tx=optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9), place_state=FACTORS
        ),
    ),
    Program("sm3", Recipe(tx=optax.sm3(0.1), place_state=FACTORS)),
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
    Program("muon_replicated", Recipe(tx=CONTRIB.muon(1e-3), state={})),
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
        "fsdp_transposed",
        Recipe("grid", {"w": P("data", "model")}, {"w": P("model", "data")}, ADAM),
    ),
    Program("fsdp_other_axes", Recipe("grid", {"w": P("model")}, {"w": P("data", "model")}, ADAM)),
    Program(
        "fsdp_other_order",
        Recipe("grid", {"w": P(("model", "data"))}, {"w": P(("data", "model"))}, ADAM),
    ),
    Program(
        "fsdp_other_dimension",
        Recipe(
            "cube", {"w": P(("pod", "data"), "model")}, {"w": P("model", ("data", "pod"))}, ADAM
        ),
    ),
    Program("moe", Recipe(shapes=MOE, loss=moe_loss, tx=ADAM, **both(EXPERTS))),
    Program(
        "moe_zero1",
        Recipe(
            "grid",
            {"up": P("data"), "down": P("data")},
            {"up": P("data", "model"), "down": P("data", "model"), "router": P("data")},
            ADAM,
            loss=moe_loss,
            shapes=MOE,
        ),
    ),
    Program("decoder_fsdp_tp", decoder(mesh="grid", **both(DECODER_TP))),
    Program("decoder_zero1", decoder(state=DECODER_ZERO)),
    Program("decoder_zero2", decoder(state=DECODER_ZERO, on_grads=constrain)),
    Program(
        "decoder_adafactor",
        decoder(
            mesh="grid",
            params=DECODER_TP,
            tx=FACTORED,
            place_state=by_shape({(512, 256): P(None, "model"), (256,): P("model")}),
        ),
    ),
    Program("several_steps_fsdp", several_steps(Recipe(tx=ADAM, **both(FSDP)))),
    Program("several_steps_zero1", several_steps(Recipe(tx=ADAM))),
    Program(
        "several_steps_layer_by_layer",
        several_steps(layers(tx=by_layer(MOMENTUM), state={"w": P(None, "data")})),
    ),
    Program("zero1_bucket", bucketed(False)),
]
# XLA sums the gradients of these in whole, though each device uses a part; so it is said.
_SUMMED = "zero1_sum_and_gather|(zero1|fsdp)_layers_on_devices"
_SUMMED_BY = {"gpu": _SUMMED, "tpu": f"{_SUMMED}|decoder_zero[12]"}


def is_summed(name: str, platform: str) -> bool:
    """Whether the compiler all-reduces gradients that a reduce-scatter would do for."""
    return platform in _SUMMED_BY and re.fullmatch(_SUMMED_BY[platform], name) is not None
