"""Pairs of a model and an `opt_nnx.Optimizer` in checkpoints, by what their states mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_core
import opt_nnx
import opt_optax_bridge as opt
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_adafactor import Adafactor
from opt_checkpoint import Checkpointer, named_state, plan_restore

P = PartitionSpec
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.layer = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))


def mesh_of(data: int, model: int) -> Any:
    devices = jax.devices()[: data * model]
    axes = (AxisType.Auto,) * 2
    return jax.make_mesh((data, model), ("data", "model"), axis_types=axes, devices=devices)


def make(
    tx: Any, mesh: Any, zero: str | None = None, kind: Callable[..., Any] = opt_nnx.Optimizer
) -> Any:
    model = Model()
    specs = {"kernel": P(None, "model"), "bias": P("model"), "calls": P()}
    variables: list[Any] = [model.layer.kernel, model.layer.bias, model.calls]
    for variable, spec in zip(variables, specs.values(), strict=True):
        variable.set_value(jax.device_put(variable[...], NamedSharding(mesh, spec)))
    if kind is nnx.Optimizer:
        return model, kind(model, tx, wrt=nnx.Param)
    return model, kind(model, tx, zero=zero)


@nnx.jit
def step(model: Any, optimizer: Any) -> None:
    def loss(model: Any) -> jax.Array:
        return jnp.mean((model.layer(jnp.asarray(X)) - 1.0) ** 2)

    optimizer.update(model, nnx.grad(loss)(model))
    model.calls[...] += 1


def trained(pair: Any, steps: int = 3) -> Any:
    for _ in range(steps):
        step(*pair)
    return pair


def groups() -> Any:
    rules = [("matrices", r".*/kernel", opt.adafactor(1e-2, min_dim_size_to_factor=8))]
    return opt_core.MultiOptimizer.from_rules(rules, rest=opt.adam(1e-2))


DEFINITIONS: dict[str, Callable[[], Any]] = {
    "transformation": lambda: optax.adamw(1e-2),
    "twin": lambda: opt.adamw(1e-2),
    "groups": groups,
    "adafactor": lambda: Adafactor(1e-2, min_dim_size_to_factor=8, beta1=0.9),
}


def equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.values(), b.values(), strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_pair_comes_back_on_another_mesh(name: str, tmp_path: Path) -> None:
    saved = trained(make(DEFINITIONS[name](), mesh_of(4, 2), zero="data"))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, saved)
        checkpointer.wait()
        target = make(DEFINITIONS[name](), mesh_of(1, 4))
        model, optimizer = plan_restore(checkpointer.at(3), target).apply()
    assert type(optimizer) is opt_nnx.Optimizer
    assert equal(named_state((model, optimizer)), named_state(saved))
    assert int(optimizer.step[...]) == int(model.calls[...]) == 3
    for old, new in zip(
        *(jax.tree.leaves(nnx.state(x[1])) for x in (target, (model, optimizer))), strict=True
    ):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    step(model, optimizer)
    assert int(optimizer.step[...]) == 4


def test_what_flax_has_saved_is_read() -> None:
    mesh = mesh_of(4, 2)
    theirs = trained(make(optax.adamw(1e-2), mesh, kind=nnx.Optimizer))
    ours = plan_restore(named_state(theirs), make(opt.adamw(1e-2), mesh, zero="data")).apply()
    assert equal(named_state(ours), named_state(theirs))
    back = plan_restore(
        named_state(ours), make(optax.adamw(1e-2), mesh, kind=nnx.Optimizer)
    ).apply()
    assert type(back[1]) is nnx.Optimizer
    assert equal(named_state(back), named_state(theirs))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_leaves_have_the_names_of_the_other_kinds(name: str) -> None:
    model, optimizer = make(DEFINITIONS[name](), mesh_of(1, 1))
    names = [n for n in named_state((model, optimizer)) if n != "params/calls"]
    assert names == list(named_state(optimizer.to_core(model)))
