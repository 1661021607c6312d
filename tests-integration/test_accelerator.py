"""On a GPU or TPU the wrapped step does what it does on the CPU, and what Optax's does.

Run by the accelerator workflow with `-m accelerator`; skipped where there is none.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from opt_core import Optimizer

pytestmark = pytest.mark.accelerator

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 100)
DEFINITIONS: dict[str, Callable[[], opt.OptaxWrapper]] = {
    "adamw": lambda: opt.adamw(SCHEDULE),
    "lion": lambda: opt.lion(1e-2),
    "adafactor": lambda: opt.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: opt.muon(1e-2),
}


def make_params() -> dict[str, jax.Array]:
    w = jax.random.normal(jax.random.key(0), (256, 128))
    return {"w": w, "b": jnp.zeros(128)}


def train(definition: opt.OptaxWrapper, device: jax.Device) -> Optimizer:
    with jax.default_device(device):
        optimizer = definition.create(make_params())

        traces = []

        @functools.partial(jax.jit, donate_argnums=0)
        def step(optimizer: Optimizer) -> Optimizer:
            traces.append(optimizer)
            return optimizer.apply_gradient(jax.tree.map(jnp.sin, optimizer.target))

        for _ in range(4):
            optimizer = step(optimizer)
    assert len(traces) == 1
    return optimizer


@pytest.mark.parametrize("name", DEFINITIONS)
def test_accelerator_equals_cpu(name: str) -> None:
    definition = DEFINITIONS[name]()
    with jax.default_matmul_precision("highest"):
        here = train(definition, jax.devices()[0])
        there = train(definition, jax.devices("cpu")[0])
    assert {leaf.device for leaf in jax.tree.leaves(here.target)} == {jax.devices()[0]}
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_compiled_step_costs_what_optax_costs(name: str) -> None:
    definition = DEFINITIONS[name]()
    tx = definition.optax_optimizer
    optimizer = definition.create(make_params())

    def raw(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    wrapped = jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0)
    ours = wrapped.lower(optimizer, optimizer.target).compile().cost_analysis()
    theirs = jax.jit(raw, donate_argnums=(0, 1))
    lowered = theirs.lower(optimizer.target, optimizer.state.param_states, optimizer.target)
    cost = lowered.compile().cost_analysis()
    assert ours is not None
    assert cost is not None
    assert ours["bytes accessed"] - cost["bytes accessed"] <= 64  # the step counter
    assert ours.get("flops", 0.0) - cost.get("flops", 0.0) <= 8


def test_state_dict_crosses_devices() -> None:
    definition = opt.adamw(SCHEDULE)
    here = train(definition, jax.devices()[0])
    state_dict = jax.device_get(here.state_dict())
    with jax.default_device(jax.devices("cpu")[0]):
        there = definition.create(make_params()).restore_state(state_dict)
    back = definition.create(make_params()).restore_state(jax.device_get(there.state_dict()))
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(a, b)
