"""Plans against live arrays and compiled steps, on 8 virtual devices."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from opt_partition import memory_plan

RULES = [("mlp", "model"), ("vocab", "model"), ("heads", "model"), ("embed", "fsdp")]
PARAMS = {
    "embedding": jnp.zeros((16, 8), jnp.bfloat16),
    "block": {
        "query": jnp.zeros((8, 4, 6)),
        "wi": jnp.zeros((8, 12)),
        "odd": jnp.zeros((5, 7)),
        "square": jnp.zeros((8, 8)),
        "bias": jnp.zeros((12,)),
    },
    "temperature": jnp.zeros(()),
}
AXES = {
    "embedding": ("vocab", "embed"),
    "block": {
        "query": ("embed", "heads", None),
        "wi": ("embed", "mlp"),
        "odd": ("embed", "mlp"),
        "square": ("embed", None),
        "bias": ("mlp",),
    },
    "temperature": (),
}


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "other", params)


# What every transformation keeps, `test_partition_table.py` lays over devices.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
    "lion": lambda: optax.lion(1e-3, mu_dtype=jnp.bfloat16),
    "sm3": lambda: optax.sm3(1e-3),
    "multisteps": lambda: optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4),
    "partition": lambda: optax.partition(
        {"matrix": optax.adafactor(1e-3, min_dim_size_to_factor=4), "other": optax.adam(1e-3)},
        _labels,
    ),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
}


def make_mesh() -> Mesh:
    axes = {"data": 2, "fsdp": 2, "model": 2}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 3)


def bytes_on_each_device(tree: Any) -> Counter[int]:
    """Bytes that every device really holds of the arrays of a tree."""
    held: Counter[int] = Counter({device.id: 0 for device in jax.devices()})
    for array in jax.tree.leaves(tree):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        for shard in array.addressable_shards:
            held[shard.device.id] += np.asarray(shard.data).nbytes
    return held


def place(tree: Any, shardings: Any) -> Any:
    return jax.jit(lambda leaves: leaves, out_shardings=shardings)(tree)


@pytest.mark.sample(3)
@pytest.mark.parametrize("zero", [None, "data", ("data", "model")], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_agrees_with_live_arrays_to_the_byte(name: str, zero: Any) -> None:
    tx = OPTIMIZERS[name]()
    plan = memory_plan(tx, PARAMS, AXES, [*RULES], make_mesh(), zero=zero)
    params = place(PARAMS, plan.params.shardings)
    state = jax.jit(tx.init, out_shardings=plan.state.shardings)(params)
    for tree, planned in [
        (params, plan.param_bytes_per_device),
        (state, plan.state_bytes_per_device),
    ]:
        assert set(bytes_on_each_device(tree).values()) == {planned}
    by_field: Counter[str] = Counter()
    rows = [row for row in plan.rows if row.kind == "state"]
    for row, array in zip(rows, jax.tree.leaves(state), strict=True):
        by_field[row.field] += bytes_on_each_device(array)[3]
    assert plan.state_fields == by_field


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "multisteps", "partition"])
def test_it_agrees_with_the_arguments_of_the_compiled_step(name: str) -> None:
    tx = OPTIMIZERS[name]()
    mesh = make_mesh()
    plan = memory_plan(tx, PARAMS, AXES, RULES, mesh, zero="data", zero_level=2)

    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = (plan.params.shardings, plan.state.shardings, plan.grads.shardings)
    compiled = (
        jax.jit(
            step,
            in_shardings=shardings,
            out_shardings=shardings[:2],
            donate_argnums=(0, 1),
            keep_unused=True,
        )
        .lower(plan.params.shapes, plan.state.shapes, plan.grads.shapes)
        .compile()
    )
    # The CPU adds no padding: the arguments are the arrays and nothing else.
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.argument_size_in_bytes == plan.total_bytes_per_device
    assert analysis.alias_size_in_bytes == (
        plan.param_bytes_per_device + plan.state_bytes_per_device
    )


@pytest.mark.parametrize(("dtype", "packed"), [("int4", 2), ("int2", 4), ("float32", 1)])
def test_elements_of_less_than_a_byte_count_as_one(dtype: str, packed: int) -> None:
    params = {"w": jnp.zeros((64, 32), dtype)}
    plan = memory_plan(optax.identity(), params, {"w": ("embed", "mlp")}, RULES, make_mesh())
    live = place(params, plan.params.shardings)
    assert plan.param_bytes == live["w"].nbytes
    assert set(bytes_on_each_device(live).values()) == {plan.param_bytes_per_device}
    compiled = jax.jit(lambda tree: tree, keep_unused=True).lower(live).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.argument_size_in_bytes * packed == plan.param_bytes_per_device
