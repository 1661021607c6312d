"""Triples as optimizer definitions."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import opt_legacy_stax as ours
import pytest
from jax.example_libraries import optimizers as theirs
from jax.sharding import PartitionSpec as P
from opt_core.errors import RestoreError, TreeMismatchError
from stax_testing import NAMES, assert_same, triple_of

PARAMS: Any = {
    "w": jnp.arange(6.0).reshape(2, 3),
    "b": jnp.ones(3, jnp.bfloat16),
    "s": jnp.ones(()),
}
STEPS = 8


def grads_at(i: int) -> Any:
    return jax.tree.map(lambda p: jnp.cos(i + p.astype(jnp.float32)).astype(p.dtype), PARAMS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_switches_and_comes_back_is_the_same(name: str) -> None:
    triple = triple_of(name, rate=ours.exponential_decay(0.1, 5, 0.5))
    update = jax.jit(triple.update_fn)
    states = [triple.init_fn(PARAMS)]
    for i in range(STEPS):
        states.append(update(jnp.int32(i), grads_at(i), states[-1]))
    definition = ours.to_optimizer_def(triple)
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads))
    optimizer = definition.convert_state(states[3], 3)
    for i in range(3, STEPS):
        optimizer = step(optimizer, grads_at(i))
    state, i = definition.convert_state_back(optimizer)
    assert int(i) == STEPS
    assert_same(state, states[-1])
    again = definition.create(PARAMS)
    again = again.restore_state(optimizer.state_dict())
    chex.assert_trees_all_equal(again, optimizer, strict=True)


def test_another_optimizers_state_dict_is_refused() -> None:
    optimizer = ours.to_optimizer_def(ours.adam(0.1)).create({"w": jnp.ones(2)})
    other = ours.to_optimizer_def(ours.momentum(0.1, 0.9)).create({"w": jnp.ones(2)})
    with pytest.raises(RestoreError):
        other.restore_state(optimizer.state_dict())


AXES = {"w": P("embed", "mlp"), "b": P("mlp"), "s": P()}


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "sm3"])
def test_axes_are_derived(name: str) -> None:
    definition = ours.to_optimizer_def(triple_of(name))
    shapes = jax.eval_shape(definition.create, PARAMS)
    for optimizer in (definition.create(PARAMS), shapes):
        derived = definition.derive_logical_axes(optimizer, AXES)
        assert derived.target == AXES
        kept = derived.state.param_states
        assert derived.state.step is None
        if name == "sm3":
            assert kept["w"][1:3] == (P("embed", "mlp"), [P("embed"), P("mlp")])
            assert kept["w"][3] == (None, None)
            assert kept["b"][1:3] == (P("mlp"), [P("mlp")])
        elif name != "sgd":
            assert set(kept["w"][1:]) == {P("embed", "mlp")}
            assert set(kept["b"][1:]) == {P("mlp")}
            assert set(kept["s"][1:]) == {P()}


def test_definitions_compare_and_gradients_are_checked() -> None:
    one, other = (ours.to_optimizer_def(ours.adam(rate)) for rate in (0.1, 0.2))
    assert one == ours.to_optimizer_def(ours.adam(0.1))
    assert ours.to_optax(one).triple == one.triple  # type: ignore[arg-type]
    assert one != other
    optimizer = one.create({"w": jnp.ones(2)})
    with pytest.raises(TreeMismatchError, match=r"w: expected shape \(2,\), found \(3,\)"):
        optimizer.apply_gradient({"w": jnp.ones(3)})
    donated = jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0)
    assert int(donated(optimizer, {"w": jnp.ones(2)}).state.step) == 1


def test_converted_parameters_are_not_weak() -> None:
    state: Any = theirs.sgd(0.1).init_fn(jnp.asarray(1.0))
    for way in (ours.to_optimizer_def, ours.to_optax):
        converted: Any = way(ours.sgd(0.1)).convert_state(state, 0)
        assert not any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(converted))
