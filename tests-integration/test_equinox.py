"""Equinox modules: restored, frozen; one that was not filtered is an error everywhere.

`examples/recipes/train_equinox.py` trains one.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_partition as part
import optax
import pytest
from flax import serialization
from jax.sharding import AbstractMesh
from opt_checkpoint import TrainingState, named_state, plan_restore
from opt_core import FROZEN, MultiOptimizer, Optimizer

MODEL: Any = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
ARRAYS = eqx.filter(MODEL, eqx.is_array)
AXES = jax.tree.map(lambda leaf: ("out", "in")[: leaf.ndim], ARRAYS)
RULES = [("out", "data"), ("in", None)]
MESH = AbstractMesh((2,), ("data",))
TX = optax.adam(1e-3)
STATE = TrainingState(TX, MODEL, TX.init(ARRAYS))

FUNCTIONS: dict[str, Callable[[], Any]] = {
    "explain": lambda: part.explain(TX, MODEL, AXES),
    "memory_plan": lambda: part.memory_plan(TX, MODEL, AXES, RULES, MESH),
    "named_state": lambda: named_state(STATE),
    "plan_restore": lambda: plan_restore(named_state(opt.adam(1e-3).create(ARRAYS)), STATE),
    "create": lambda: opt.adam(1e-3).create(MODEL),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_error_says_how_to_filter(function: str) -> None:
    with pytest.raises((TypeError, ValueError), match=r"eqx\.(filter|partition)") as caught:
        FUNCTIONS[function]()
    assert all(path in str(caught.value) for path in ("activation", "final_activation"))
    assert "weight" not in str(caught.value)


def test_modules_go_through_bytes() -> None:
    fresh = opt.sgd(0.1, momentum=0.9).create(ARRAYS)
    trained = fresh.apply_gradient(ARRAYS)
    data = serialization.msgpack_serialize(jax.device_get(trained.state_dict()))
    restored = fresh.restore_state(serialization.msgpack_restore(data))
    structure: Any = jax.tree.structure(restored)
    assert structure == jax.tree.structure(trained)
    jax.tree.map(np.testing.assert_array_equal, restored, trained)


def test_frozen_functions_of_a_module_stay() -> None:
    rules = [("layers/.*", opt.sgd(0.1))]
    grads = jax.tree.map(lambda x: jnp.ones_like(x) if eqx.is_array(x) else None, MODEL)
    optimizer: Optimizer = MultiOptimizer.from_rules(rules, rest=FROZEN).create(MODEL)
    stepped = optimizer.apply_gradient(grads)
    assert stepped.target.activation is MODEL.activation
    assert not jnp.array_equal(stepped.target.layers[0].weight, MODEL.layers[0].weight)
