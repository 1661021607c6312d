"""A state keeps its structure, shapes, dtypes and weak types, and can be donated from the start."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge
import optax
import pytest
from bridge_testing import (
    assert_same_bits,
    avals,
    definition,
    extra_args_of,
    grads_of,
    make_params,
    transformation,
)
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

NAMES = opt_optax_bridge.optimizer_names()


def is_weak(tree: Any) -> bool:
    return any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(tree))


def abstract_step(name: str, optimizer: Optimizer, grad_dtype: Any) -> Any:
    """The avals after a step; nothing is compiled."""

    def stepped(optimizer: Optimizer) -> Optimizer:
        grads = grads_of(name, optimizer.target)
        extra_args = extra_args_of(name, optimizer.target, grads)
        grads = jax.tree.map(lambda g: g.astype(grad_dtype), grads)
        return optimizer.apply_gradient(grads, **extra_args)

    return jax.eval_shape(stepped, optimizer)


def optax_can(name: str, tx: Any, grad_dtype: Any) -> bool:
    """Whether the bare transformation makes a step; some have branches of different dtypes."""

    def stepped(params: Any) -> Any:
        grads = grads_of(name, params)
        extra_args = extra_args_of(name, params, grads)
        grads = jax.tree.map(lambda g: g.astype(grad_dtype), grads)
        return tx.update(grads, tx.init(params), params, **extra_args)

    try:
        jax.eval_shape(stepped, make_params(jnp.bfloat16))
    except (TypeError, FutureWarning):
        return False
    return True


def test_what_a_transformation_makes_of_numbers_is_not_weak() -> None:
    def weak(params: Any) -> Any:
        return {"weak": jnp.asarray(1.0), "number": 2.0}

    tx = optax.GradientTransformation(weak, lambda u, s, p=None: (u, weak(p)))
    assert is_weak(tx.init(make_params()))
    optimizer = OptaxWrapper(tx).create(make_params())
    assert not is_weak(optimizer)
    assert not is_weak(optimizer.apply_gradient(make_params()))


def lenient(tx: Any) -> Any:
    """The transformation under the promotion that Optax is written for."""

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return tx.init(params)

    def update(*args: Any, **extra_args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(*args, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_ours_promotes_nothing(name: str) -> None:
    with pytest.raises(ValueError, match="promotion"):  # so it is strict outside of Optax
        jnp.float32(1) + jnp.bfloat16(1)
    optimizer = OptaxWrapper(lenient(transformation(name))).create(make_params(jnp.bfloat16))
    if optax_can(name, lenient(transformation(name)), jnp.bfloat16):
        assert avals(abstract_step(name, optimizer, jnp.bfloat16)) == avals(optimizer)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("name", NAMES)
def test_float32_gradients_of_bfloat16_parameters_change_no_aval(name: str) -> None:
    optimizer = definition(name).create(make_params(jnp.bfloat16))
    if optax_can(name, transformation(name), jnp.float32):
        assert avals(abstract_step(name, optimizer, jnp.float32)) == avals(optimizer)


def test_arrays_of_the_transformation_survive_a_donation() -> None:
    key = jax.random.key(7)
    wrapper = opt_optax_bridge.noisy_sgd(0.1, key=key)
    jax.jit(lambda o: o, donate_argnums=0)(wrapper.create(make_params()))
    assert not key.is_deleted()
    assert wrapper == opt_optax_bridge.noisy_sgd(0.1, key=jax.random.key(7))
    assert_same_bits(wrapper.create(make_params()), wrapper.create(make_params()))
