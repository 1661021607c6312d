"""opt-precision where transformations go: windows, guards, run-time numbers, NNX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_nnx
import opt_optax_bridge as opt
import opt_precision as op
import optax
import pytest
from flax import nnx
from opt_accumulate import MultiSteps, guard
from opt_core import Optimizer
from opt_precision.errors import OrderError


def wrapped(learning_rate: Any) -> Any:
    inner: Any = op.quantize_state(optax.adamw(learning_rate), op.dynamic8())
    return op.stochastic_weights(inner)


def params() -> dict[str, Any]:
    return {"kernel": (0.02 * jax.random.normal(jax.random.key(0), (64, 256))).astype(jnp.bfloat16)}


def grads(step: int) -> dict[str, Any]:
    return {"kernel": jax.random.normal(jax.random.key(step), (64, 256))}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_hyper_parameters_at_run_time() -> None:
    definition = opt.wrap_optax_optimizer(wrapped)
    start: Optimizer = definition(1e-3).create(params())
    step: Any = jax.jit(lambda o, rate: o.apply_gradient(grads(0), learning_rate=rate))
    other: Optimizer = definition(0.1).create(params())
    other = jax.jit(lambda o: o.apply_gradient(grads(0)))(other)
    found = step(start, 0.1)
    structures: Any = jax.tree.structure(found.state), jax.tree.structure(start.state)
    assert structures[0] == structures[1]
    assert bits(found.target) == bits(other.target)
    assert bits(step(start, 1e-3).target) != bits(found.target)
    assert step._cache_size() == 1


def test_windows_of_mini_steps() -> None:
    steps: Any = MultiSteps(wrapped(1e-2), 2)
    start = params()
    state, apply = steps.init(start), jax.jit(steps.apply)
    half, state = apply(start, state, grads(0))
    assert bits(half) == bits(start)
    whole, state = apply(half, state, grads(1))
    tx = wrapped(1e-2)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, grads(0), grads(1))
    expected, _ = jax.jit(tx.apply)(start, tx.init(start), mean)
    one, other = (np.asarray(tree["kernel"], np.float32) for tree in (whole, expected))
    np.testing.assert_allclose(one, other, rtol=2**-7)
    with pytest.raises(OrderError, match="`quantize_state` is around `MultiSteps`"):
        op.quantize_state(MultiSteps(optax.adam(1e-3), 2), op.dynamic8())


def test_a_guarded_step_leaves_every_code() -> None:
    tx: Any = guard(wrapped(1e-2))
    start = params()
    state, apply = tx.init(start), jax.jit(tx.apply)
    new, state = apply(start, state, grads(0), loss=jnp.float32(1))
    codes = bits(op.decode(state.inner))
    bad = jax.tree.map(lambda g: g.at[0, 0].set(jnp.nan), grads(1))
    kept, state = apply(new, state, bad, loss=jnp.float32(1))
    assert bits(kept) == bits(new)
    assert bits(op.decode(state.inner)) == codes


def test_nnx_optimizers() -> None:
    model = nnx.Linear(64, 256, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer: Any = opt_nnx.Optimizer(model, wrapped(1e-2))
    x = jax.random.normal(jax.random.key(1), (8, 64))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert model.kernel[...].dtype == jnp.bfloat16
    assert "uint8" in {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(optimizer))}
