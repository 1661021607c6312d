"""opt-core with Equinox modules as parameters."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from opt_core import (
    FROZEN,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    check_gradients,
    increment_step,
)
from opt_core.errors import RestoreError


class Momentum(OptimizerDef):
    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        check_gradients(params, grads)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state.param_states, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta)
        return params, OptimizerState(increment_step(state.step), momenta)


def network(seed: int = 0) -> tuple[Any, Any]:
    """The arrays of a network, and the rest: activation functions, sizes."""
    model = eqx.nn.MLP(2, "scalar", width_size=3, depth=1, key=jax.random.key(seed))
    return eqx.partition(model, eqx.is_array)


X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2)


def train_step(optimizer: Optimizer, static: Any) -> tuple[Optimizer, Any]:
    def loss(params: Any) -> Any:
        predictions = jax.vmap(eqx.combine(params, static))(X)
        return jnp.mean((predictions - X.sum(axis=1)) ** 2)

    value, grads = jax.value_and_grad(loss)(optimizer.target)
    return optimizer.apply_gradient(grads), value


def leaves(tree: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]


def test_training_a_module_under_jit_and_scan() -> None:
    params, static = network()
    definition = Momentum(None)
    shapes = jax.eval_shape(definition.create, params)
    optimizer = jax.jit(definition.create)(params)
    structure: Any = jax.tree.structure(optimizer)
    assert structure == jax.tree.structure(shapes)

    step = jax.jit(lambda o: train_step(o, static), donate_argnums=0)
    looped = definition.create(network()[0])
    losses = []
    for _ in range(8):
        looped, value = step(looped)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert structure == jax.tree.structure(looped)

    scanned, values = jax.jit(
        lambda o: jax.lax.scan(lambda o, _: train_step(o, static), o, length=8)
    )(optimizer)
    np.testing.assert_allclose(values, losses, rtol=1e-4)
    assert int(scanned.state.step) == 8
    assert isinstance(eqx.combine(scanned.target, static), eqx.nn.MLP)


def test_modules_go_through_bytes() -> None:
    params, static = network()
    trained, _ = train_step(Momentum(None).create(params), static)
    data = serialization.msgpack_serialize(trained.state_dict())
    state_dict = serialization.msgpack_restore(data)
    assert state_dict["target"]["layers"]["0"]["weight"].shape == (3, 2)
    assert sorted(state_dict["target"]) == ["activation", "final_activation", "layers"]

    fresh = Momentum(None).create(network(seed=1)[0])
    restored = fresh.restore_state(state_dict)
    assert leaves(restored) == leaves(trained)
    structure: Any = jax.tree.structure(restored)
    assert structure == jax.tree.structure(trained)

    del state_dict["target"]["layers"]["1"]["bias"]
    state_dict["state"]["param_states"]["layers"]["0"]["weight"] = np.zeros((2, 3), np.float32)
    with pytest.raises(RestoreError) as caught:
        fresh.restore_state(state_dict)
    assert [mismatch.path for mismatch in caught.value.report.mismatches] == [
        "state/param_states/layers/0/weight",
        "target/layers/1/bias",
    ]


def test_frozen_functions_of_a_module_stay() -> None:
    model = eqx.nn.MLP(2, "scalar", width_size=3, depth=1, key=jax.random.key(0))
    definition = MultiOptimizer.from_rules([("layers/.*", Momentum(None))], rest=FROZEN)
    grads = jax.tree.map(lambda x: jnp.ones_like(x) if eqx.is_array(x) else None, model)
    stepped = definition.create(model).apply_gradient(grads)
    assert stepped.target.activation is model.activation
    assert not jnp.array_equal(stepped.target.layers[0].weight, model.layers[0].weight)
