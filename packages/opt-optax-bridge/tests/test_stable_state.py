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
PRECISIONS = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float32 grads on bfloat16": (jnp.bfloat16, jnp.float32),
}


def is_weak(tree: Any) -> bool:
    return any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(tree))


def abstract_step(name: str, optimizer: Optimizer, grad_dtype: Any, **overrides: Any) -> Any:
    """The avals after a step; nothing is compiled."""

    def stepped(optimizer: Optimizer, overrides: Any) -> Optimizer:
        grads = grads_of(name, optimizer.target)
        extra_args = extra_args_of(name, optimizer.target, grads)
        grads = jax.tree.map(lambda g: g.astype(grad_dtype), grads)
        return optimizer.apply_gradient(grads, **extra_args, **overrides)

    return jax.eval_shape(stepped, optimizer, overrides)


def optax_can(name: str, tx: Any, param_dtype: Any, grad_dtype: Any) -> bool:
    """Whether the bare transformation makes a step; some have branches of different dtypes."""

    def stepped(params: Any) -> Any:
        grads = grads_of(name, params)
        extra_args = extra_args_of(name, params, grads)
        grads = jax.tree.map(lambda g: g.astype(grad_dtype), grads)
        return tx.update(grads, tx.init(params), params, **extra_args)

    try:
        jax.eval_shape(stepped, make_params(param_dtype))
    except (TypeError, FutureWarning):
        return False
    return True


@pytest.mark.sample(6)
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_changes_no_aval(name: str, precision: str) -> None:
    param_dtype, grad_dtype = PRECISIONS[precision]
    optimizer = definition(name).create(make_params(param_dtype))
    assert not is_weak(optimizer)
    assert avals(optimizer.state.step) == avals(jnp.zeros((), jnp.int32))
    raw = transformation(name).init(make_params(param_dtype))
    dtypes = [jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(raw)]
    assert [leaf.dtype for leaf in jax.tree.leaves(optimizer.state.param_states)] == dtypes
    if not optax_can(name, transformation(name), param_dtype, grad_dtype):
        with pytest.raises((TypeError, FutureWarning)):
            abstract_step(name, optimizer, grad_dtype)
        return
    assert avals(abstract_step(name, optimizer, grad_dtype)) == avals(optimizer)
    first = next(iter(optimizer.optimizer_def.hyper_params.__dataclass_fields__), None)
    if first not in (None, "learning_rate" if name == "rprop" else None):
        assert avals(abstract_step(name, optimizer, grad_dtype, **{first: 0.5})) == avals(optimizer)


def test_what_init_makes_of_numbers_is_not_weak() -> None:
    tx = optax.GradientTransformation(
        lambda params: {"weak": jnp.asarray(1.0), "number": 2.0},
        lambda updates, state, params=None: (updates, state),
    )
    assert is_weak(tx.init(make_params()))
    assert not is_weak(OptaxWrapper(tx).create(make_params()))


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
    if optax_can(name, lenient(transformation(name)), jnp.bfloat16, jnp.bfloat16):
        assert avals(abstract_step(name, optimizer, jnp.bfloat16)) == avals(optimizer)


def test_arrays_of_the_transformation_survive_a_donation() -> None:
    key = jax.random.key(7)
    wrapper = opt_optax_bridge.noisy_sgd(0.1, key=key)
    jax.jit(lambda o: o, donate_argnums=0)(wrapper.create(make_params()))
    assert not key.is_deleted()
    assert wrapper == opt_optax_bridge.noisy_sgd(0.1, key=jax.random.key(7))
    assert_same_bits(wrapper.create(make_params()), wrapper.create(make_params()))
