"""Logical axes as Flax's two interfaces and T5X's metadata hold them, in and out of `jit`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.linen.partitioning import AxisMetadata
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_partition import derive_logical_axes, explain
from opt_partition.errors import AxesError

KERNEL = P("embed", "mlp")


@pytest.fixture(scope="module")
def boxed() -> Any:
    """The parameters of a linen module, the kernel in a box."""
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    dense = nn.Dense(6, kernel_init=init)
    return jax.eval_shape(dense.init, jax.random.key(0), jnp.ones((2, 8)))["params"]


def test_boxes_of_linen(boxed: Any) -> None:
    params = nn.unbox(boxed)
    for axes in (boxed, freeze(boxed), nn.get_partition_spec(boxed)):
        adam = derive_logical_axes(optax.adam(0.1), params, axes)[0]
        assert adam.mu["kernel"] == KERNEL
        assert not any(adam.mu["bias"])


def test_metadata_of_t5x(boxed: Any) -> None:
    axes = {"kernel": AxisMetadata(names=KERNEL), "bias": AxisMetadata(names=P("mlp"))}
    adam = derive_logical_axes(optax.adam(0.1), freeze(nn.unbox(boxed)), axes)[0]
    assert dict(adam.nu) == {"kernel": KERNEL, "bias": P("mlp")}


@pytest.mark.filterwarnings("ignore:'sharding.*' is deprecated")  # the older Flax has no other
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sharding", "sharding_names", "out_sharding"])
def test_metadata_of_nnx(name: str) -> None:
    """Of a state of variables, whatever the version of Flax calls the metadata."""
    metadata: Any = {name: ("embed", "mlp"), "eager_sharding": False}
    init = nnx.with_metadata(nnx.initializers.lecun_normal(), **metadata)
    model = nnx.eval_shape(lambda: nnx.Linear(8, 6, kernel_init=init, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    pure = nnx.to_pure_dict(state)
    specs = nnx.get_partition_spec(state)
    forms = [state, dict(state)]
    if nnx.to_pure_dict(specs)["kernel"]:  # the older Flax makes none of the newest name
        forms += [specs, nnx.to_pure_dict(specs)]
    for params in (state, pure, dict(state)):
        for axes in forms:
            rows = explain(optax.scale_by_adam(), params, axes, strict=True).rows
            found = {row.path: row.axes for row in rows}
            assert {axes for path, axes in found.items() if "kernel" in path} == {("embed", "mlp")}
            assert {axes for path, axes in found.items() if "bias" in path} == {(None,)}
        with pytest.raises(AxesError, match=r"arrays but no axis names.* nnx.get_partition_spec"):
            explain(optax.scale_by_adam(), params, pure)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_in_the_scope_of_a_mesh_and_while_tracing(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    tx = optax.chain(optax.adafactor(0.1, min_dim_size_to_factor=2), optax.scale_by_lbfgs(3))
    axes = {"w": ("a", "b")}
    expected = derive_logical_axes(tx, {"w": jnp.ones((8, 8))}, axes)
    set_mesh: Any = jax.set_mesh
    with set_mesh(mesh):
        w = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data", "model")))
        assert derive_logical_axes(tx, {"w": w}, axes) == expected
        found = []
        jax.eval_shape(lambda w: found.append(derive_logical_axes(tx, {"w": w}, axes)), w)
    assert found == [expected]
