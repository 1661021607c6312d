"""On a GPU or TPU every optimizer does what it does on the CPU, in place, and what Optax does."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import opt_adafactor
import opt_nnx
import opt_optax_bridge as opt
import optax
import pytest
from accelerator import assert_close, make_params, on_both
from flax import nnx
from opt_core import Optimizer, OptimizerDef

pytestmark = pytest.mark.accelerator

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 100)
WRAPPED: dict[str, Callable[[], opt.OptaxWrapper]] = {
    "adamw": lambda: opt.adamw(SCHEDULE),
    "lion": lambda: opt.lion(1e-2),
    "adafactor": lambda: opt.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: opt.muon(1e-2),
}
DEFINITIONS: dict[str, Callable[[], OptimizerDef]] = {
    **WRAPPED,
    "adafactor of T5X": lambda: opt_adafactor.Adafactor(1e-2, min_dim_size_to_factor=8),
}


def train(definition: OptimizerDef) -> Optimizer:
    optimizer: Optimizer = definition.create(make_params())
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
def test_the_cpu_has_the_same_numbers(name: str) -> None:
    definition = DEFINITIONS[name]()
    assert_close(*on_both(lambda _: train(definition)))


def test_no_bfloat16_parameter_is_held_in_float32() -> None:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params())
    optimizer = opt.adamw(1e-2, mu_dtype=jnp.float32).create(params)
    step = jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0)
    cost: Any = step.lower(optimizer, params).compile().cost_analysis()
    read, again, written = 2 + 2 + 4 + 2, 2 + 2 + 4 + 2, 2 + 4 + 2  # bytes of an element
    size = sum(p.size for p in jax.tree.leaves(params))
    # Written as float32 and read by what needs it, parameters or gradients would add 6 each.
    assert cost["bytes accessed"] < (read + again + written) * size + 1024


def test_nnx_keeps_everything_on_the_device() -> None:
    def train(_: jax.Device) -> Any:
        model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        optimizer = opt_nnx.Optimizer(model, optax.adamw(1e-2))
        x = jnp.sin(jnp.arange(32.0).reshape(4, 8))

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> None:
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
            optimizer.update(model, grads)

        for _step in range(3):
            step(model, optimizer, x)
        return nnx.state(model, nnx.Param), nnx.state(optimizer)

    assert_close(*on_both(train))
