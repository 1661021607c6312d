"""An Equinox module that was not filtered: every function names the leaves and what to do."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import opt_optax_bridge as opt
import opt_partition as part
import optax
import pytest
from jax.sharding import AbstractMesh
from opt_checkpoint import TrainingState, named_state, plan_restore

MODEL: Any = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
ARRAYS = eqx.filter(MODEL, eqx.is_array)
AXES = jax.tree.map(lambda leaf: ("out", "in")[: leaf.ndim], ARRAYS)
RULES = [("out", "data"), ("in", None)]
MESH = AbstractMesh((2,), ("data",))
TX = optax.adam(1e-3)
SPECS = part.normalise_param_axes(ARRAYS, AXES)
PLAN = part.memory_plan(TX, ARRAYS, AXES, RULES, MESH)
STATE = TrainingState(TX, MODEL, TX.init(ARRAYS))

FUNCTIONS: dict[str, Callable[[], Any]] = {
    "explain": lambda: part.explain(TX, MODEL, AXES),
    "derive_logical_axes": lambda: part.derive_logical_axes(TX, MODEL, AXES),
    "memory_plan": lambda: part.memory_plan(TX, MODEL, AXES, RULES, MESH),
    "normalise_param_axes": lambda: part.normalise_param_axes(MODEL, AXES),
    "shard_optimizer_state": lambda: part.shard_optimizer_state(
        TX, MODEL, RULES, MESH, "data", param_axes=AXES
    ),
    "logical_to_mesh": lambda: part.logical_to_mesh(SPECS, RULES, MESH, MODEL),
    "extend_over": lambda: part.extend_over(PLAN.params, MODEL, MESH, "data"),
    "init_sharded": lambda: part.init_sharded(TX, MODEL, PLAN.state),
    "named_state": lambda: named_state(STATE),
    "plan_restore": lambda: plan_restore(named_state(opt.adam(1e-3).create(ARRAYS)), STATE),
    "as_transformation": lambda: opt.as_transformation(opt.adam(1e-3)).init(MODEL),
    "create": lambda: opt.adam(1e-3).create(MODEL),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_error_says_how_to_filter(function: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"eqx\.(filter|partition)") as caught:
        FUNCTIONS[function]()
    assert all(path in str(caught.value) for path in ("activation", "final_activation"))
    assert "weight" not in str(caught.value)
