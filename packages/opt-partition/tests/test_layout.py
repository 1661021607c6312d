from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from opt_partition import Layout
from opt_partition.errors import AxesError

P = PartitionSpec
MESH = AbstractMesh((4, 2), ("data", "model"))


def leaf(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_layout_is_what_it_was_made_from() -> None:
    on_host = NamedSharding(MESH, P(), memory_kind="pinned_host")
    specs = {"w": P("data", "model"), "b": None, "m": on_host}
    shapes = {"w": leaf(8, 6), "b": leaf(6, dtype=jnp.bfloat16), "m": leaf()}
    layout = Layout.from_specs(specs, shapes, MESH)
    assert layout.specs == {"w": P("data", "model"), "b": P(None), "m": P()}
    assert layout.shardings["m"] == on_host
    assert [(row.path, row.bytes, row.bytes_per_device) for row in layout.rows] == [
        ("b", 12, 12),
        ("m", 4, 4),
        ("w", 192, 24),
    ]
    assert (layout.bytes, layout.bytes_per_device) == (208, 40)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), layout.shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert Layout.from_specs(layout, shapes, MESH) == layout
    assert Layout.from_specs(layout.shardings, shapes, MESH) == layout


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (P(None, "model"), "dimension 1 of (8, 7) is not divisible by model=2"),
        (
            P(P.UNCONSTRAINED),
            f"{P(P.UNCONSTRAINED)} has unconstrained dimensions; specify their mesh axes",
        ),
    ],
)
def test_specs_are_checked(spec: Any, problem: str) -> None:
    with pytest.raises(AxesError) as caught:
        Layout.from_specs({"w": spec, "b": P()}, {"w": leaf(8, 7), "b": leaf(3)}, MESH)
    assert str(caught.value) == f"`specs` do not match the leaves and the mesh:\n  w: {problem}"


def test_keys_have_the_bytes_of_their_data() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    layout = Layout.from_specs(P("data"), keys, MESH)
    assert layout.bytes == jax.random.key_data(keys).nbytes
    assert layout.bytes_per_device * 4 == layout.bytes
