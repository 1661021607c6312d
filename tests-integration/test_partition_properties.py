"""Random trees, transformations of the table and rules: axes, layouts and live bytes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from hypothesis import HealthCheck, given, settings
from jax.sharding import AxisType
from opt_partition import explain, extend_over, init_sharded, logical_to_mesh
from optax_case import MIN_DIM
from optax_table import TABLE
from partition_oracles import (
    CHANGE,
    axes_by_sizes,
    derived,
    dimensions,
    disagreements,
    leaf_shapes,
    names,
    shard_bytes,
)

# Sizes that a probe can change without one passing another, or the threshold.
SIZES = range(MIN_DIM + 4, 200, CHANGE + 1)

distinct_shapes = st.lists(st.sampled_from(SIZES), max_size=4, unique=True).map(tuple)
# Sizes of which some divide by the mesh, some in part, and some are equal.
any_shapes = st.lists(st.sampled_from([1, 2, 4, 6, 8, 8, 7]), max_size=3).map(tuple)


def struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def trees(shapes: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Any]:
    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from(["kernel", "nu", "count"]), inner, min_size=1),
        )

    inside = st.recursive(shapes.map(struct), containers, max_leaves=5)
    return st.dictionaries(st.sampled_from(["a", "b", "c"]), inside, min_size=1)


# Their builders know the parameters of the table, or take no others.
PARTICULAR = {"contrib.scale_by_muon", "contrib.muon: dimensions", "user: preconditioners"}
# With what a matrix caps, as a random one does, the rank of GaLore moves.
cases = st.sampled_from(
    sorted(n for n in TABLE if n not in PARTICULAR and "galore" not in n and "complex" not in n)
)
relaxed = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@settings(relaxed, max_examples=12)
@given(trees(distinct_shapes), cases)
def test_axes_are_those_of_the_dimensions_that_move_together(tree: Any, name: str) -> None:
    params = TABLE[name].wrap(tree)
    tx = TABLE[name].build(params)
    explanation = explain(tx, params, names(params))
    assert disagreements(derived(explanation), axes_by_sizes(tx.init, params)) == []


@settings(relaxed, max_examples=10)
@given(trees(any_shapes), cases, st.data())
def test_live_state_has_the_bytes_of_its_layout(tree: Any, name: str, data: st.DataObject) -> None:
    params = TABLE[name].wrap(tree)
    tx = TABLE[name].build(params)
    explanation = explain(tx, params, names(params))
    meshes = st.sampled_from([None, "data", "model", ("data", "model")])
    rules = [(f"{path}:{dim}", data.draw(meshes)) for path, dim in dimensions(params)]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    layout = logical_to_mesh(explanation.axes, rules, mesh, explanation.state)
    if data.draw(st.booleans()):
        layout = extend_over(layout, explanation.state, mesh, "data")
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    state = init_sharded(tx, zeros, layout)
    assert leaf_shapes(state) == {row.path: row.shape for row in explanation.rows}
    assert shard_bytes(state) == [layout.bytes_per_device] * jax.device_count()
