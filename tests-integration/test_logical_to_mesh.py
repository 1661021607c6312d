"""Rule tables are read as Flax reads them, and real arrays follow the layouts."""

from typing import Any

import flax.linen
import jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, PartitionSpec
from opt_partition import logical_to_mesh

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
@settings(deadline=None, max_examples=50)
def test_rules_mean_what_they_mean_to_flax(names: list[Any], rules: list[Any]) -> None:
    """Where every dimension divides and no name repeats; Flax knows neither case."""
    leaf = jax.ShapeDtypeStruct((16,) * len(names), "float32")
    layout = logical_to_mesh(P(*names), rules, MESH, leaf, on_unknown="replicate")
    assert layout.specs == linen.logical_to_mesh_axes(tuple(names), rules)
