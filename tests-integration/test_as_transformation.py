"""Definitions in the place of transformations, in what others have for those."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_partition as part
import optax
import pytest
from opt_adafactor import Adafactor
from opt_core import FROZEN, MultiOptimizer, describe_state

PARAMS = {"kernel": jnp.full((8, 4), 0.5, jnp.float32), "bias": jnp.zeros(4), "frozen": jnp.ones(2)}
GRADS = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), PARAMS)
AXES = {"kernel": ("embed", "mlp"), "bias": ("mlp",), "frozen": (None,)}


def adafactor() -> Any:
    return Adafactor(0.1, min_dim_size_to_factor=4, beta1=0.9)


def groups() -> Any:
    rules = [("kernel", "kernel", adafactor()), ("bias", "bias", opt.adamw(0.1))]
    return MultiOptimizer.from_rules(rules, rest=FROZEN)


MADE: dict[str, Callable[[], Any]] = {
    "adafactor": adafactor,
    "groups": groups,
    "chain": lambda: opt.chain(opt.clip_by_global_norm(1.0), opt.adamw(0.1)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MADE)
def test_in_chains_and_wrappers_of_optax(name: str) -> None:
    inner = opt.as_transformation(MADE[name]())
    tx = optax.MultiSteps(optax.chain(optax.clip(0.5), inner, optax.scale(0.5)), 2)
    step: Any = jax.jit(tx.update)
    params: Any = PARAMS
    state = tx.init(params)
    for _ in range(2):
        updates, state = step(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    optimizer = MADE[name]().create(PARAMS)
    clipped = jax.tree.map(lambda g: jnp.clip(g, -0.5, 0.5), GRADS)
    stepped = jax.jit(lambda o, g: o.apply_gradient(g))(optimizer, clipped)
    expected = jax.tree.map(lambda p, q: p + 0.5 * (q - p), PARAMS, stepped.params)
    for ours, theirs in zip(*map(jax.tree.leaves, (expected, params)), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MADE)
def test_its_state_has_axes_and_a_description(name: str) -> None:
    tx = optax.chain(optax.clip(0.5), opt.as_transformation(MADE[name]()))
    explanation = part.explain(tx, PARAMS, AXES, strict=True)
    sharded = {row.axes for row in explanation.rows if row.parameter == "kernel"}
    assert sharded & {("embed", "mlp"), ("embed",), ("mlp",)}
    optimizer = opt.OptaxWrapper(tx).create(PARAMS)
    followed = {leaf.parameter for leaf in describe_state(optimizer).leaves}
    assert ("bias",) in followed
    restored = optimizer.restore_state(optimizer.state_dict())
    jax.tree.map(np.testing.assert_array_equal, restored, optimizer)
