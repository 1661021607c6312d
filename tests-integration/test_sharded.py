"""Optimizers on a mesh of 8 virtual devices: creation, steps, donation, restore."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_core import Optimizer

P = PartitionSpec
AXES = {"wi": P("embed", "mlp"), "wo": P("mlp", "embed"), "scale": P("embed")}
RULES = {"embed": "data", "mlp": "model"}


def make_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "wi": jax.random.normal(keys[0], (8, 16)),
        "wo": jax.random.normal(keys[1], (16, 8)),
        "scale": jnp.ones(8),
    }


def use_mesh(mesh: jax.sharding.Mesh) -> AbstractContextManager[Any]:
    set_mesh: Any = jax.set_mesh  # it is half annotated
    context: AbstractContextManager[Any] = set_mesh(mesh)
    return context


def shardings_of(
    definition: opt.OptaxWrapper, mesh: jax.sharding.Mesh
) -> tuple[Optimizer, Optimizer]:
    """The optimizer's shapes and, from the parameters' logical axes, its shardings."""
    shapes = jax.eval_shape(lambda: definition.create(make_params()))
    axes = definition.derive_logical_axes(shapes, AXES)

    def to_sharding(spec: Any) -> NamedSharding:
        names = () if spec is None else spec
        return NamedSharding(mesh, P(*(RULES[name] for name in names)))

    return shapes, jax.tree.map(to_sharding, axes, is_leaf=lambda x: x is None)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    assert jax.device_count() == 8
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)


DEFINITIONS: dict[str, Callable[[], opt.OptaxWrapper]] = {
    "adamw": lambda: opt.adamw(1e-2),
    "momentum": lambda: opt.sgd(optax.linear_schedule(0.1, 0.0, 100), momentum=0.9),
    "lion": lambda: opt.lion(1e-2),
    "chain": lambda: opt.chain([optax.scale_by_adam(), optax.scale(-1e-2)]),
}


@jax.jit
def on_one_device(optimizer: Optimizer) -> Optimizer:
    return optimizer.apply_gradient(jax.tree.map(jnp.sin, optimizer.target))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_created_and_stepped_sharded_equals_one_device(name: str, mesh: jax.sharding.Mesh) -> None:
    definition = DEFINITIONS[name]()
    _, shardings = shardings_of(definition, mesh)
    with use_mesh(mesh):
        create = jax.jit(lambda: definition.create(make_params()), out_shardings=shardings)
        optimizer = create()

        traces = []

        @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
        def step(optimizer: Optimizer) -> Optimizer:
            traces.append(optimizer)
            return optimizer.apply_gradient(jax.tree.map(jnp.sin, optimizer.target))

        for _ in range(3):
            previous = optimizer
            optimizer = step(optimizer)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(previous.target))
    assert len(traces) == 1
    mu = [leaf for leaf in jax.tree.leaves(optimizer.state) if leaf.shape == (8, 16)]
    assert {shard.data.shape for leaf in mu for shard in leaf.addressable_shards} == {(2, 8)}
    jax.tree.map(lambda leaf, s: _assert_placed(leaf, s), optimizer, shardings)

    single = definition.create(make_params())
    for _ in range(3):
        single = on_one_device(single)
    for a, b in zip(jax.tree.leaves(optimizer), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_restore_places_numpy_leaves_like_the_receiver(mesh: jax.sharding.Mesh) -> None:
    definition = DEFINITIONS["adamw"]()
    shapes, shardings = shardings_of(definition, mesh)
    with use_mesh(mesh):
        receiver = jax.jit(lambda: definition.create(make_params()), out_shardings=shardings)()
    saved = definition.create(make_params())
    saved = saved.apply_gradient(jax.tree.map(jnp.cos, saved.target))
    data = flax.serialization.msgpack_serialize(jax.device_get(saved.state_dict()))
    state_dict = flax.serialization.msgpack_restore(data)

    abstract = jax.tree.map(
        lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), shapes, shardings
    )
    for reference in (receiver, abstract):
        restored = reference.restore_state(state_dict)
        jax.tree.map(_assert_placed, restored, shardings)
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
            np.testing.assert_array_equal(a, b)


def _assert_placed(leaf: jax.Array, sharding: NamedSharding) -> None:
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
