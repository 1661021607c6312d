"""ZeRO-1 from parameters that name their own dimensions."""

from typing import Any

import jax
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from opt_partition import memory_plan, shard_optimizer_state

MESH = AbstractMesh((4, 2, 2), ("data", "replica", "model"))
RULES = [("mlp", "model"), ("embed", None)]
SHAPES = {
    "wi": jax.ShapeDtypeStruct((8, 16), "float32"),
    "bias": jax.ShapeDtypeStruct((16,), "float32"),
}
AXES = {"wi": ("embed", "mlp"), "bias": ("mlp",)}


@jax.tree_util.register_pytree_node_class
class Box:
    """As `flax.linen.LogicallyPartitioned`."""

    def __init__(self, value: Any, names: Any) -> None:
        self.value, self.names = value, names

    def get_partition_spec(self) -> P:
        return P(*self.names)

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.value,), self.names

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> "Box":
        return cls(children[0], names)


BOXED = {name: Box(shape, AXES[name]) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("zero", ["data", ("data", "replica")])
def test_it_is_the_plan_with_stored_parameters(zero: Any) -> None:
    tx = optax.adam(1e-3)
    plan = memory_plan(tx, SHAPES, AXES, RULES, MESH, zero=zero)
    compute, params, opt_state = shard_optimizer_state(tx, BOXED, RULES, MESH, zero)
    assert compute == plan.params
    assert opt_state == plan.state
    assert params.specs == opt_state.specs[0].mu == opt_state.specs[0].nu
    assert params.bytes_per_device < compute.bytes_per_device
    by_argument = shard_optimizer_state(tx, SHAPES, RULES, MESH, zero, param_axes=AXES)
    assert by_argument == (compute, params, opt_state)


def test_options_reach_state_and_parameters() -> None:
    layouts = shard_optimizer_state(
        optax.adam(1e-3),
        {**BOXED, "new": Box(SHAPES["wi"], ("embed", "heads"))},
        RULES,
        MESH,
        "data",
        min_bytes=65,
        memory_kinds="pinned_host",
        on_unknown="replicate",
    )
    assert layouts.params.specs["bias"] == layouts.compute.specs["bias"]  # 64 bytes
    assert layouts.params.specs["new"] == P(None, "data")
    assert {leaf.memory_kind for leaf in layouts.opt_state.rows} == {"pinned_host"}
    assert {leaf.memory_kind for leaf in layouts.params.rows} == {None}
