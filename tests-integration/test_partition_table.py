"""The derived axes of every transformation of Optax: by changed sizes, values, and on devices."""

from __future__ import annotations

import functools
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from opt_partition import Explanation, Layout, explain, logical_to_mesh
from optax_table import NOT_CONSTRUCTORS, TABLE, exported
from partition_oracles import (
    EQUAL,
    QUICK,
    Tree,
    axes_by_sizes,
    axes_by_variation,
    derived,
    dimensions,
    disagreements,
    first_state,
    leaf_shapes,
    names,
    numbers,
    path_of,
    random_data,
    shard_bytes,
    structs,
    train,
    training_step,
)

# Within a parameter, sizes differ by more than the probe changes them; none comes near MIN_DIM.
DISTINCT: dict[str, Any] = {
    "scalar": (),
    "bias": (20,),
    "kernel": (32, 44),
    "small": (5, 12),
    "conv": (3, 24, 40),
    "row": (1, 40),
    "layers": {"w": (4, 60, 36), "b": (4, 48)},
    "empty": (0, 28),
}


def test_the_table_has_every_constructor_that_optax_exports() -> None:
    tried = {name.partition(":")[0] for name in TABLE}
    assert set(exported()) - tried - NOT_CONSTRUCTORS == set()
    assert all(not exported()[name] for name in NOT_CONSTRUCTORS & set(exported()))


# 1. Sizes


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", TABLE)
def test_a_dimension_of_the_state_is_named_after_the_one_it_moves_with(name: str) -> None:
    case = TABLE[name]
    params = structs(DISTINCT, case)
    tx = case.build(params)
    explanation = explain(tx, params, names(params))
    assert disagreements(derived(explanation), axes_by_sizes(tx.init, params)) == []


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


CONTAINERS: dict[str, Tree] = {
    "FrozenDict": flax.core.freeze({"a": {"w": struct(20, 32), "b": struct(32)}}),
    "None": {"a": struct(20, 32), "b": None, "c": (None, struct(12))},
}
IN_CONTAINERS = ("adafactor: momentum", "sm3", "flatten", "partition", "user: in a chain")


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", IN_CONTAINERS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_parameters_may_be_in_any_container(container: str, name: str) -> None:
    params = CONTAINERS[container]
    tx = TABLE[name].build(params)
    explanation = explain(tx, params, names(params))
    structure: Any = jax.tree.structure(explanation.axes)
    assert structure == jax.tree.structure(jax.eval_shape(tx.init, params))
    assert disagreements(derived(explanation), axes_by_sizes(tx.init, params)) == []


# 2. Values


@functools.cache
def explained(name: str) -> Explanation:
    params = structs(EQUAL, TABLE[name])
    return explain(TABLE[name].build(params), params, names(params))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name, case in TABLE.items() if case.has_oracle])
def test_a_dimension_of_the_state_varies_with_the_one_it_is_named_after(name: str) -> None:
    params = structs(EQUAL, TABLE[name])
    assert disagreements(derived(explained(name)), axes_by_variation(name, params)) == []


# 3. Devices

# Sums over shards have another order: up to 2e-5 after three steps (measured); of bfloat16 a digit.
RTOL = 1e-4
RTOL_BFLOAT16 = 2.0**-7


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def layouts(name: str, mesh: Mesh) -> tuple[Layout, Layout]:
    """Where parameters and state lie: the last two dimensions over `data` and `model`."""
    params = structs(EQUAL, TABLE[name])
    sizes = leaf_shapes(params)
    rules = [
        (f"{path}:{dim}", [None, "data", "model"][max(0, dim - max(0, len(sizes[path]) - 2) + 1)])
        for path, dim in dimensions(params)
    ]
    state = explained(name)
    return (
        logical_to_mesh(names(params), rules, mesh, params),
        logical_to_mesh(state.axes, rules, mesh, state.state),
    )


def assert_lies_as(layout: Layout, tree: Tree) -> None:
    def assert_leaf(path: Any, leaf: jax.Array, sharding: Any) -> None:
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (path_of(path), leaf.sharding)

    jax.tree_util.tree_map_with_path(assert_leaf, tree, layout.shardings)
    assert shard_bytes(tree) == [layout.bytes_per_device] * 8


def assert_close(ours: Tree, theirs: Tree, rtol: float) -> None:
    if any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(theirs)):
        rtol = RTOL_BFLOAT16
    expected = numbers(theirs)
    for path, array in numbers(ours).items():
        scale = np.max(np.abs(expected[path]), initial=1e-30)
        np.testing.assert_allclose(
            array / scale, expected[path] / scale, rtol=0, atol=rtol, err_msg=path
        )


@functools.cache
def reference(name: str) -> tuple[list[Tree], tuple[Tree, Tree]]:
    """Random data, and what one device makes of it."""
    data = random_data(structs(EQUAL, TABLE[name]))
    return data, train(name, data)


BY_DEFAULT = {("sm3", AxisType.Auto), ("adam", AxisType.Explicit)}
# `explicit` says why a transformation fails on an Explicit mesh.
ON_DEVICES = [
    pytest.param(
        name,
        kind,
        id=f"{kind.name.lower()}-{name}",
        marks=() if (name, kind) in BY_DEFAULT else pytest.mark.slow,
    )
    for kind in (AxisType.Auto, AxisType.Explicit)
    for name, case in TABLE.items()
    if not case.grows and not (kind == AxisType.Explicit and case.explicit)
]


@pytest.mark.parametrize(("name", "kind"), ON_DEVICES)
def test_a_step_keeps_the_shardings_and_computes_what_one_device_does(
    name: str, kind: AxisType
) -> None:
    case = TABLE[name]
    if not explained(name).rows:
        pytest.skip("it has no state")
    mesh = mesh_of(kind)
    params_layout, state_layout = layouts(name, mesh)
    lie = params_layout.shardings, state_layout.shardings
    data, expected = reference(name)
    params, *targets = (jax.device_put(tree, lie[0]) for tree in data)
    state = jax.device_put(first_state(name, data[0]), lie[1])
    assert_lies_as(state_layout, state)
    with jax.set_mesh(mesh):
        step = jax.jit(
            training_step(name),
            in_shardings=(*lie, lie[0]),
            out_shardings=lie if kind == AxisType.Auto else None,
            compiler_options=QUICK,
        )
        for target in targets:
            params, state = step(params, state, target)
    assert_lies_as(params_layout, params)
    assert_lies_as(state_layout, state)
    assert_close((params, state), expected, case.rtol or RTOL)
