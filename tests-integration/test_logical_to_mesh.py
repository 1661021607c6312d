"""Rule tables are read as Flax reads them, and real arrays follow the layouts."""

from typing import Any

import flax.linen
import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from opt_partition import extend_over, logical_to_mesh

P = PartitionSpec
linen: Any = flax.linen  # it exports nothing explicitly
MESH = AbstractMesh((4, 2, 2), ("data", "fsdp", "model"))
NAMES = ("batch", "embed", "heads", "mlp", "vocab")
MESH_AXES = (
    st.none()
    | st.sampled_from(MESH.axis_names)
    | st.permutations(MESH.axis_names).flatmap(
        lambda axes: st.integers(1, 3).map(lambda n: tuple(axes[:n]))
    )
)


@given(
    names=st.lists(st.sampled_from(NAMES) | st.none(), max_size=5).filter(
        lambda names: len({*names} - {None}) == len([n for n in names if n])
    ),
    rules=st.lists(st.tuples(st.sampled_from(NAMES), MESH_AXES), max_size=10),
)
@settings(deadline=None, max_examples=150)
def test_rules_mean_what_they_mean_to_flax(names: list[Any], rules: list[Any]) -> None:
    """Where every dimension divides and no name repeats; Flax knows neither case."""
    leaf = jax.ShapeDtypeStruct((16,) * len(names), "float32")
    layout = logical_to_mesh(P(*names), rules, MESH, leaf, on_unknown="replicate")
    assert layout.specs == linen.logical_to_mesh_axes(tuple(names), rules)


def test_arrays_hold_what_the_layout_says() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    tree = {"w": np.ones((8, 6), np.float32), "b": np.ones(6, np.int8), "s": np.ones((), np.int32)}
    axes = {"w": P("embed", "mlp"), "b": P("mlp"), "s": P()}
    layout = logical_to_mesh(axes, {"embed": "fsdp", "mlp": "model"}, mesh, tree)
    for step in (layout, extend_over(layout, tree, mesh, "data")):
        held = dict.fromkeys(jax.devices(), 0)
        for array in jax.tree.leaves(jax.device_put(tree, step.shardings)):
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert held == dict.fromkeys(jax.devices(), step.bytes_per_device)
    assert (layout.bytes_per_device, step.bytes_per_device) == (48 + 3 + 4, 24 + 3 + 4)
