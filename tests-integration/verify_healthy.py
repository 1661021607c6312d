"""Healthy training steps: `verify` must find nothing wrong with them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import optax
from verify_moves import ring_gather_in_a_loop
from verify_recipes import (
    F32,
    LAYERS,
    MOMENTUM,
    Meshes,
    P,
    Program,
    Recipe,
    Step,
    both,
    by_shape,
    constrain,
    layers,
    layers_loss,
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
    bucketed,
    by_hand,
    by_layer,
    clipped,
    decoder,
    micro_batched,
    moe_loss,
    multi_steps,
    placed_gather,
    ring_gather,
    several_steps,
    sum_and_slice,
    sum_scatter,
)

CONTRIB: Any = optax.contrib


def healthy(name: str, build: Callable[[Meshes], Step], **more: Any) -> Program:
    return Program(name, build, **more)


def in_micro_batches(gradients: Any) -> Recipe:
    batch = jax.ShapeDtypeStruct((4, 64, 256), F32)
    return Recipe(tx=ADAM, batch=batch, batch_spec=P(None, "data"), gradients=gradients)


ANY = {"state_gathers": "any"}
HEALTHY: list[Program] = [
    healthy("replicated", Recipe(tx=ADAM, state={})),
    healthy("zero1_adamw", Recipe(tx=ADAM)),
    healthy("zero1_momentum", Recipe()),
    healthy("zero1_lion", Recipe(tx=optax.lion(1e-3))),
    healthy("zero1_lamb", Recipe(tx=optax.lamb(1e-3))),
    healthy("zero1_clipped", Recipe(tx=clipped(ADAM))),
    healthy("zero1_clipped_by_unit", Recipe(tx=optax.chain(optax.adaptive_grad_clip(0.1), ADAM))),
    healthy("zero1_columns", Recipe(tx=ADAM, state={"w": P(None, "data"), "b": P("data")})),
    healthy("zero1_bf16_params", Recipe(tx=optax.adamw(1e-3, mu_dtype=F32), shapes=BF16)),
    healthy("zero1_injected", Recipe(tx=optax.inject_hyperparams(optax.adamw)(1e-3))),
    healthy("zero1_schedule", Recipe(tx=optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))),
    healthy("zero1_ema_of_updates", Recipe(tx=optax.chain(ADAM, optax.ema(0.9)))),
    healthy("zero1_groups", Recipe(tx=GROUPS)),
    healthy("zero1_masked", Recipe(tx=optax.masked(ADAM, {"w": True, "b": False}))),
    healthy("zero1_finite", Recipe(tx=optax.apply_if_finite(ADAM, 3))),
    healthy("zero1_schedule_free", Recipe(tx=CONTRIB.schedule_free_adamw(1e-3))),
    healthy("zero1_over_tp", Recipe("grid", TP, {"w": P("data", "model"), "b": P("model")}, ADAM)),
    healthy(
        "zero1_over_tp_order",
        Recipe("grid", TP, {"w": P(None, ("model", "data")), "b": P(("model", "data"))}, ADAM),
    ),
    healthy(
        "zero1_over_tp_other_order",
        Recipe("grid", TP, {"w": P(None, ("data", "model")), "b": P(("data", "model"))}, ADAM),
    ),
    healthy("zero1_two_axes", Recipe("grid", {}, {"w": P("data", "model"), "b": P("data")}, ADAM)),
    healthy(
        "zero1_both_axes", Recipe("grid", {}, {"w": P(("data", "model")), "b": P("data")}, ADAM)
    ),
    healthy(
        "zero1_other_dimension",
        Recipe("grid", {"w": P("model")}, {"w": P("data", "model"), "b": P("data")}, ADAM),
    ),
    healthy(
        "zero1_pods",
        Recipe(
            "cube",
            {"w": P("data", "model")},
            {"w": P(("data", "pod"), "model"), "b": P("pod")},
            ADAM,
            batch_spec=P(("pod", "data")),
        ),
    ),
    healthy("zero1_scatter_and_gather", by_hand(sum_scatter, all_gather)),
    healthy("zero1_sum_and_gather", by_hand(sum_and_slice, all_gather)),
    healthy("zero1_ring", by_hand(sum_scatter, ring_gather)),
    healthy("zero1_ring_in_a_loop", by_hand(sum_scatter, ring_gather_in_a_loop)),
    healthy("zero1_placed_sum", by_hand(sum_scatter, placed_gather)),
    healthy("zero1_layers", layers(tx=ADAM, state={"w": P(None, "data")})),
    healthy("zero1_layers_on_devices", layers(tx=ADAM, state={"w": P("data")})),
    healthy("zero1_layer_by_layer", layers(tx=by_layer(MOMENTUM), state={"w": P(None, "data")})),
    healthy("zero2_adamw", Recipe(tx=ADAM, on_grads=constrain)),
    healthy("zero2_layers", layers(tx=ADAM, state={"w": P(None, "data")}, on_grads=constrain)),
    healthy("fsdp_adamw", Recipe(tx=ADAM, **both(FSDP))),
    healthy("fsdp_clipped", Recipe(tx=clipped(ADAM), **both(FSDP))),
    healthy("fsdp_lamb", Recipe(tx=optax.lamb(1e-3), **both(FSDP))),
    healthy("fsdp_layers", layers(tx=ADAM, **both({"w": P(None, "data")}))),
    healthy(
        "fsdp_layers_remat",
        Recipe(
            shapes=LAYERS,
            loss=functools.partial(layers_loss, remat=True),
            tx=ADAM,
            **both({"w": P(None, None, "data")}),
        ),
    ),
    healthy("fsdp_layers_on_devices", layers(tx=ADAM, **both({"w": P("data")}))),
    healthy("fsdp_tp_adamw", Recipe("grid", tx=ADAM, **both(FSDP_TP))),
    healthy("fsdp_tp_clipped", Recipe("grid", tx=clipped(ADAM), **both(FSDP_TP))),
    healthy("fsdp_pods", Recipe("cube", tx=ADAM, **both({"w": P(("pod", "data"), "model")}))),
    healthy(
        "hsdp",
        Recipe("cube", tx=ADAM, batch_spec=P(("pod", "data")), **both({"w": P("data", "model")})),
    ),
    healthy("tp_adamw", Recipe("grid", tx=ADAM, **both(TP))),
    healthy("zero1_multi_steps", Recipe(tx=multi_steps(3))),
    healthy("zero1_multi_steps_every_step", Recipe(tx=multi_steps(1))),
    healthy("fsdp_multi_steps", Recipe(tx=multi_steps(3), **both(FSDP))),
    healthy("zero1_multi_steps_finite", Recipe(tx=optax.apply_if_finite(multi_steps(2), 3))),
    healthy("zero1_micro_batches", in_micro_batches(micro_batched(True))),
    healthy("zero1_micro_batches_deferred", in_micro_batches(micro_batched(False))),
    healthy("adafactor_zero1", Recipe(tx=FACTORED, place_state=FACTORS)),
    healthy(
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
    healthy(
        "adafactor_momentum",
        Recipe(
            tx=optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=0.9), place_state=FACTORS
        ),
    ),
    healthy("sm3", Recipe(tx=optax.sm3(0.1), place_state=FACTORS)),
    healthy(
        "muon",
        Recipe(
            "grid",
            FSDP_TP,
            tx=CONTRIB.muon(1e-3),
            place_state=by_shape({(256, 512): P("data", "model"), (512,): P("model")}),
        ),
        options=ANY,
    ),
    healthy("muon_replicated", Recipe(tx=CONTRIB.muon(1e-3), state={})),
    healthy(
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
    healthy(
        "fsdp_transposed",
        Recipe("grid", {"w": P("data", "model")}, {"w": P("model", "data")}, ADAM),
    ),
    healthy("fsdp_other_axes", Recipe("grid", {"w": P("model")}, {"w": P("data", "model")}, ADAM)),
    healthy(
        "fsdp_other_order",
        Recipe("grid", {"w": P(("model", "data"))}, {"w": P(("data", "model"))}, ADAM),
    ),
    healthy(
        "fsdp_other_dimension",
        Recipe(
            "cube", {"w": P(("pod", "data"), "model")}, {"w": P("model", ("data", "pod"))}, ADAM
        ),
    ),
    healthy("moe", Recipe(shapes=MOE, loss=moe_loss, tx=ADAM, **both(EXPERTS))),
    healthy(
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
    healthy("decoder_fsdp_tp", decoder(mesh="grid", **both(DECODER_TP))),
    healthy("decoder_zero1", decoder(state=DECODER_ZERO)),
    healthy("decoder_zero2", decoder(state=DECODER_ZERO, on_grads=constrain)),
    healthy(
        "decoder_adafactor",
        decoder(
            mesh="grid",
            params=DECODER_TP,
            tx=FACTORED,
            place_state=by_shape({(512, 256): P(None, "model"), (256,): P("model")}),
        ),
    ),
    healthy("several_steps_fsdp", several_steps(Recipe(tx=ADAM, **both(FSDP)))),
    healthy("several_steps_zero1", several_steps(Recipe(tx=ADAM))),
    healthy(
        "several_steps_layer_by_layer",
        several_steps(layers(tx=by_layer(MOMENTUM), state={"w": P(None, "data")})),
    ),
    healthy("zero1_bucket", bucketed(False)),
]
# XLA sums the gradients of these in whole, though each device uses a part; so it is said.
_SUMMED = "zero1_sum_and_gather|(zero1|fsdp)_layers_on_devices"
_SUMMED_BY = {"gpu": _SUMMED, "tpu": f"{_SUMMED}|decoder_zero[12]"}


def is_summed(name: str, platform: str) -> bool:
    """Whether the compiler all-reduces gradients that a reduce-scatter would do for."""
    return platform in _SUMMED_BY and re.fullmatch(_SUMMED_BY[platform], name) is not None
