"""What the accelerator tests share: devices, parameters, meshes and comparisons.

Without an accelerator the first virtual CPU device stands in for one: a rehearsal, every night.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

FIRST = jax.devices()[0]
CPU = jax.devices("cpu")[-1]
COUNT = jax.device_count()

needs_several = pytest.mark.skipif(COUNT < 2, reason="needs several devices")
needs_host_memory = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="earlier versions return state in device memory"
)

# Each product is by a power of two, and so exact: joined with a sum (FMA) or not, no bit changes.
EXACT_ADAMW = optax.adamw(2.0**-10, b1=0.5, b2=0.5, weight_decay=2.0**-4)


def make_params(dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """A matrix and a vector of numbers from 1/4 to 1 with any sign: no small step crosses zero."""
    rng = np.random.default_rng(0)
    shapes = {"w": (256, 128), "b": (128,)}
    return {
        name: jnp.asarray(rng.choice([-1, 1], shape) * rng.uniform(0.25, 1, shape), dtype)
        for name, shape in shapes.items()
    }


def normal(seed: int, *shape: int) -> Any:
    """Normal numbers in float32, made on the host: the same for every device."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_grads(seed: int, params: Any) -> dict[str, Any]:
    """A gradient for each parameter, on the host; of whole eighths, whose squares are exact."""
    return {name: np.round(8 * normal(seed, *leaf.shape)) / 8 for name, leaf in params.items()}


def on_both(make: Callable[[jax.Device], Any]) -> tuple[Any, Any]:
    """What a function makes on the first device and on the CPU, with products in float32."""

    def on(device: jax.Device) -> Any:
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            made = make(device)
        assert {leaf.device for leaf in jax.tree.leaves(made)} == {device}
        return made

    return on(FIRST), on(CPU)


def assert_equal(one: Any, other: Any) -> None:
    """Every leaf has the same bits."""
    keyed = jax.tree_util.tree_leaves_with_path(one)
    for (path, a), b in zip(keyed, jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def assert_close(one: Any, other: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Every leaf is nearly the same."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def assert_near(one: Any, other: Any, tolerance: float, share: float = 0.0) -> None:
    """Every leaf is nearly the same, by its largest element, but for a share of its elements.

    Where an update is a sign, or is divided by its own size, those near zero may point either way.
    """
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        difference = np.abs(np.asarray(a) - np.asarray(b))
        assert (difference > tolerance * np.abs(b).max()).mean() <= share


def mesh_of(
    count: int = COUNT, kind: AxisType = AxisType.Auto, devices: Sequence[jax.Device] = ()
) -> Mesh:
    """Some devices, by default the first ones, along one axis, `data`."""
    devices = devices or jax.devices()[:count]
    return jax.make_mesh((len(devices),), ("data",), axis_types=(kind,), devices=devices)


def over(mesh: Mesh, *spec: str | None) -> NamedSharding:
    """A sharding on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def memory_kinds(tree: Any) -> list[Any]:
    """The kind of memory in which each leaf lies."""
    return [leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)]


def bytes_on(device: jax.Device, tree: Any) -> int:
    """The bytes of a tree that a device holds."""
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)
