"""opt-partition and the state of opt-precision: placed and planned to the byte, and verified."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import opt_precision as op
import optax
import pytest
from jax.sharding import AxisType
from opt_partition import init_sharded, memory_plan

SHAPES = {"long": (8192,), "odd": (512, 1000), "short": (128, 3, 4, 32), "wide": (512, 1024)}
AXES = {"long": ("m",), "odd": ("e", "m"), "short": ("e", None, "m", None), "wide": ("e", "m")}
RULES = [("e", "data"), ("m", "model")]


def mesh() -> Any:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def params() -> Any:
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in SHAPES.items()}


def wrapped(**options: Any) -> Any:
    inner: Any = op.quantize_state(optax.adamw(1e-3), op.dynamic8(), **options)
    return op.master_weights(inner, storage="remainder")


@pytest.mark.parametrize("zero", [None, "data"])
def test_the_plan_is_to_the_byte(zero: Any) -> None:
    rules = op.partition_rules()
    plan = memory_plan(wrapped(), params(), AXES, RULES, mesh(), zero=zero, derivation_rules=rules)
    number = sum(leaf.size for leaf in jax.tree.leaves(params()))
    fields = plan.state_fields
    assert fields["Encoded.codes"] >= 2 * number // 8
    assert fields["RemainderState.low"] >= 2 * number // 8
    assert 0 < fields["Encoded.scale"] <= 0.1 * fields["Encoded.codes"]
    assert "temporaries, at most" in str(plan)
    state = jax.jit(
        lambda: wrapped().init(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params())),
        out_shardings=plan.state.shardings,
    )()
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert set(held.values()) == {plan.state_bytes_per_device}


def test_scales_lie_where_their_blocks_do() -> None:
    plan = memory_plan(
        wrapped(), params(), AXES, RULES, mesh(), derivation_rules=op.partition_rules()
    )
    specs = {row.leaf.path: tuple(row.leaf.spec) for row in plan.rows if row.kind == "state"}
    under = "inner/inner/0/nu/"
    assert specs[under + "wide/codes"] == specs[under + "wide/scale"] == ("data", "model")
    assert specs[under + "odd/codes"] == ("data", "model")
    assert specs[under + "long/scale"] == ("model",)
    assert specs[under + "short/scale"] == (None, None, "model", None)  # a block over 4 devices
    assert any("scale" in note for note in plan.notes)


def test_init_sharded_takes_the_rules() -> None:
    shapes, on = params(), mesh()
    start = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    plan = memory_plan(wrapped(), shapes, AXES, RULES, on, derivation_rules=op.partition_rules())
    held = jax.device_put(start, plan.params.shardings)
    state = init_sharded(wrapped(), held, plan.state)
    assert jax.tree.map(lambda x: x.sharding.spec, state) == jax.tree.map(
        lambda s: s.spec, plan.state.shardings
    )
