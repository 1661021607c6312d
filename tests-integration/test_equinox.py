"""Equinox modules: trained, frozen, restored; one that was not filtered is an error everywhere."""

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
from opt_core.errors import RestoreError

MODEL: Any = eqx.nn.MLP(2, 2, 4, depth=1, key=jax.random.key(0))
ARRAYS, STATIC = eqx.partition(MODEL, eqx.is_array)
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


X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)


def train_step(optimizer: Optimizer, _: object = None) -> tuple[Optimizer, Any]:
    def loss(params: Any) -> Any:
        return jnp.mean((jax.vmap(eqx.combine(params, STATIC))(X) - X[:, ::-1]) ** 2)

    value, grads = jax.value_and_grad(loss)(optimizer.target)
    return optimizer.apply_gradient(grads), value


def test_training_a_module_in_a_loop_and_under_scan() -> None:
    definition = opt.sgd(0.1, momentum=0.9)
    optimizer = jax.jit(definition.create)(ARRAYS)
    structure: Any = jax.tree.structure(optimizer)
    assert structure == jax.tree.structure(jax.eval_shape(definition.create, ARRAYS))
    step, looped, losses = jax.jit(train_step), optimizer, []
    for _ in range(8):
        looped, value = step(looped)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert structure == jax.tree.structure(looped)
    scanned, values = jax.jit(lambda o: jax.lax.scan(train_step, o, length=8))(optimizer)
    np.testing.assert_allclose(values, losses, rtol=1e-4)
    assert isinstance(eqx.combine(scanned.target, STATIC), eqx.nn.MLP)


def test_modules_go_through_bytes() -> None:
    fresh = opt.sgd(0.1, momentum=0.9).create(ARRAYS)
    trained, _ = train_step(fresh)
    data = serialization.msgpack_serialize(jax.device_get(trained.state_dict()))
    state_dict = serialization.msgpack_restore(data)
    assert sorted(state_dict["target"]) == ["activation", "final_activation", "layers"]
    restored = fresh.restore_state(state_dict)
    structure: Any = jax.tree.structure(restored)
    assert structure == jax.tree.structure(trained)
    jax.tree.map(np.testing.assert_array_equal, restored, trained)
    del state_dict["target"]["layers"]["1"]["bias"]
    with pytest.raises(RestoreError, match="target/layers/1/bias"):
        fresh.restore_state(state_dict)


def test_frozen_functions_of_a_module_stay() -> None:
    rules = [("layers/.*", opt.sgd(0.1))]
    grads = jax.tree.map(lambda x: jnp.ones_like(x) if eqx.is_array(x) else None, MODEL)
    optimizer: Optimizer = MultiOptimizer.from_rules(rules, rest=FROZEN).create(MODEL)
    stepped = optimizer.apply_gradient(grads)
    assert stepped.target.activation is MODEL.activation
    assert not jnp.array_equal(stepped.target.layers[0].weight, MODEL.layers[0].weight)
