"""What makes a state: transformations, functions, and what has the methods of opt-core."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_partition import derive_logical_axes, explain, init_sharded, memory_plan

PARAMS = {"w": jnp.ones((8, 4))}
AXES = {"w": ("embed", "mlp")}
RULES = [("mlp", "model"), ("embed", None)]


@dataclasses.dataclass(frozen=True)
class Definition:
    tx: Any

    def init_state(self, params: Any) -> Any:
        return {"step": jnp.zeros((), jnp.int32), "param_states": self.tx.init(params)}


TX = optax.trace(0.9)
DEFINITION = Definition(TX)


@pytest.mark.parametrize("maker", [TX, TX.init, DEFINITION])
def test_every_function_takes_every_maker(maker: Any) -> None:
    rows = {row.path.rpartition("trace/")[2]: row for row in explain(maker, PARAMS, AXES).rows}
    assert rows["w"].axes == ("embed", "mlp")
    axes = derive_logical_axes(maker, PARAMS, AXES)
    assert ("step" in axes) == (maker is DEFINITION)
    plan = memory_plan(maker, PARAMS, AXES, RULES, AbstractMesh((2,), ("model",)))
    assert plan.state_fields["TraceState.trace"] == 4 * 8 * 4 // 2
    mesh = jax.make_mesh((1,), ("model",), axis_types=(AxisType.Auto,))
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, P()), axes)
    state = init_sharded(maker, PARAMS, shardings)
    assert ("step" in state) == ("step" in axes)
    assert jax.tree.leaves(state)[0].shape == (8, 4)


def test_anything_else_is_an_error() -> None:
    for function in (explain, derive_logical_axes):
        with pytest.raises(TypeError, match=r"`tx` must be an Optax transformation.* got float"):
            function(0.1, PARAMS, AXES)  # type: ignore[arg-type]
