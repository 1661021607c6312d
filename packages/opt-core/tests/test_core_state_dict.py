import random
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import (
    Pair,
    assert_same,
    flax_trees,
    given,
    leaf_paths,
    to_numpy,
    trees,
)
from flax import serialization
from hypothesis import strategies as st
from opt_core import OptimizerDef, OptimizerState, restore_state_dict, to_state_dict
from opt_core.errors import RestoreError, StateDictError
from opt_core.extend import path_str


def through_bytes(state_dict: Any) -> Any:
    return serialization.msgpack_restore(serialization.msgpack_serialize(state_dict))


def zeros_like(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


def deviations(reference: Any, state_dict: Any) -> list[tuple[str, str]]:
    """The path and the kind of each."""
    try:
        restore_state_dict(reference, state_dict)
    except RestoreError as error:
        return [(mismatch.path, mismatch.kind) for mismatch in error.mismatches]
    return []


# Writing.


@given(tree=flax_trees)
def test_the_layout_is_that_of_flax(tree: Any) -> None:
    # Flax leaves the int keys of a FrozenDict and of OrderedDicts alone; neither is generated.
    theirs = serialization.to_state_dict(tree)
    ours = to_state_dict(tree)
    assert sorted(leaf_paths(ours)) == sorted(leaf_paths(theirs))
    assert_same(ours, theirs)


@given(tree=trees)
def test_containers_without_leaves_and_none_may_be_absent(tree: Any) -> None:
    kept, dropped = to_state_dict(tree), to_state_dict(tree, keep_empty=False)
    assert list(leaf_paths(dropped)) == list(leaf_paths(kept))
    assert {} not in [node for node in nodes(dropped) if node is not dropped]
    assert_same(restore_state_dict(zeros_like(tree), dropped), tree)

    def without_none(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        return {name: without_none(child) for name, child in node.items() if child is not None}

    found = restore_state_dict({"root": zeros_like(tree)}, without_none({"root": dropped}))
    assert_same(found, {"root": tree})


def nodes(state_dict: Any) -> list[dict[str, Any]]:
    if not isinstance(state_dict, dict):
        return []
    return [state_dict, *(node for child in state_dict.values() for node in nodes(child))]


# Reading back what was written.


@given(tree=trees)
def test_round_trip_into_arrays_shapes_and_numpy(tree: Any) -> None:
    written = through_bytes(to_state_dict(tree))
    for reference in (zeros_like(tree), jax.eval_shape(lambda: tree)):
        assert_same(restore_state_dict(reference, written), tree)
        assert_same(restore_state_dict(reference, to_state_dict(tree)), tree)
    result = restore_state_dict(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree), written)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(result))
    assert_same(jax.tree.map(jnp.array, result), tree)


@pytest.mark.parametrize(("impl", "shape"), [("threefry2x32", ()), ("rbg", (2, 2))])
def test_typed_keys_round_trip(impl: str, shape: tuple[int, ...]) -> None:
    def key(seed: int) -> Any:
        key = jax.random.key(seed, impl=impl)
        return jax.random.split(key, shape) if shape else key

    state_dict = through_bytes(to_state_dict({"key": key(3)}))
    assert state_dict["key"].dtype == np.uint32
    for reference in (key(0), jax.eval_shape(lambda: key(0))):
        result = restore_state_dict({"key": reference}, state_dict)
        assert_same(result, {"key": key(3)})
    assert_same(restore_state_dict({"key": key(0)}, {"key": key(3)}), {"key": key(3)})


# Reading what deviates.


def _extra(parent: dict[str, Any], name: str) -> tuple[str, str]:
    parent[name + "!"] = np.zeros(2)
    return name + "!", "extra"


def _missing(parent: dict[str, Any], name: str) -> tuple[str, str]:
    del parent[name]
    return name, "missing"


def _shape(parent: dict[str, Any], name: str) -> tuple[str, str]:
    parent[name] = np.asarray(parent[name])[None]
    return name, "shape"


def _dtype(parent: dict[str, Any], name: str) -> tuple[str, str]:
    parent[name] = np.zeros(parent[name].shape, np.float16)
    return name, "dtype"


def _subtree(parent: dict[str, Any], name: str) -> tuple[str, str]:
    parent[name] = {"deep": {"er": parent[name]}}
    return name, "container"


def _value(parent: dict[str, Any], name: str) -> tuple[str, str]:
    parent[name] = None
    return name, "value"


@given(
    tree=trees.map(lambda tree: {"root": tree, "one": jnp.ones(2)}),
    mutations=st.lists(
        st.sampled_from([_extra, _missing, _shape, _dtype, _subtree, _value]), max_size=5
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_exactly_the_deviations_are_reported(tree: Any, mutations: list[Any], seed: int) -> None:
    reference, state_dict = zeros_like(tree), through_bytes(to_state_dict(tree))
    paths = list(leaf_paths(state_dict))
    mutated = random.Random(seed).sample(paths, min(len(mutations), len(paths)))
    expected = []
    for mutate, (*names, name) in zip(mutations, mutated, strict=False):
        parent = state_dict
        for outer in names:
            parent = parent[outer]
        reported, kind = mutate(parent, name)
        expected.append((path_str((*names, reported)), kind))
    assert sorted(deviations(reference, state_dict)) == sorted(expected)


LEAF, CONTAINER, VALUE = np.zeros(3), "container", "value"


@pytest.mark.parametrize(
    ("reference", "found", "kind"),
    [
        ({"a": jnp.ones(3)}, LEAF, CONTAINER),
        (Pair(1, 2), None, CONTAINER),
        (LEAF, {}, CONTAINER),
        ("text", {"deep": 1}, CONTAINER),
        (None, {}, VALUE),
        (None, LEAF, VALUE),
    ],
)
def test_leaves_containers_and_none_are_not_each_other(
    reference: Any, found: Any, kind: str
) -> None:
    assert deviations({"x": reference}, {"x": found}) == [("x", kind)]


# Scalars.

SCALARS: list[tuple[Any, Any, Any]] = [
    (np.int32, 7, 7),
    (np.int32, 2**31, None),
    (np.int32, 1.0, None),
    (np.int32, True, None),
    (np.float32, 0.1, np.float32(0.1)),
    (np.float32, 1e39, None),
    (np.float32, float("inf"), np.inf),
    (np.float32, 1, None),
    (jnp.bfloat16, 1e39, None),
    (np.bool_, True, True),
    (np.complex64, 1.0, None),
]


@pytest.mark.parametrize(("dtype", "found", "expected"), SCALARS)
def test_numbers_fit_scalars_of_their_kind(dtype: Any, found: Any, expected: Any) -> None:
    reference = {"x": jnp.zeros((), dtype)}
    if expected is None:
        assert deviations(reference, {"x": found}) == [("x", "value")]
        return
    result = restore_state_dict(reference, {"x": found})
    assert result["x"].dtype == dtype
    assert np.asarray(result["x"]) == expected
    assert not result["x"].weak_type


@pytest.mark.parametrize(
    ("reference", "fits", "deviates"),
    [(1, 2, 2.0), (1, jnp.int32(2), np.array([2])), (1.5, np.float32(2.5), 2), ("a", "b", 1)],
)
def test_references_that_are_not_arrays(reference: Any, fits: Any, deviates: Any) -> None:
    result = restore_state_dict({"x": reference}, {"x": fits})
    assert result == {"x": fits}
    assert type(result["x"]) is type(reference)
    assert deviations({"x": reference}, {"x": deviates}) == [("x", "value")]


# Memory and devices.


def aligned(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An array that XLA on CPU takes without a copy."""
    buffer = np.zeros(size * 4 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size * 4].view(np.float32)


def test_numpy_arrays_are_copied() -> None:
    found = aligned(1024)
    assert found.ctypes.data % 64 == 0
    reference: dict[str, Any] = {"jax": jnp.ones(1024), "numpy": np.ones(1024, np.float32)}
    result = restore_state_dict(reference, {"jax": found, "numpy": found})
    found[:] = 5
    assert not np.any(result["jax"])
    assert not np.any(result["numpy"])


def sharded(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P()))


def test_restored_leaves_go_where_the_reference_is() -> None:
    values = {"x": jnp.ones(4), "key": jax.random.key(1), "step": jnp.int32(3)}
    state_dict = to_numpy(to_state_dict(values)) | {"step": 3}
    bound = sharded(zeros_like({k: values[k] for k in ("x", "step")}) | {"key": jax.random.key(0)})
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), bound
    )
    for reference in (bound, abstract):
        result = restore_state_dict(reference, state_dict)
        assert_same(result, values)
        for name in values:
            assert result[name].committed
            assert result[name].sharding == reference[name].sharding, name
    free = restore_state_dict(jax.tree.map(lambda x: x, values), state_dict)
    assert not any(leaf.committed for leaf in free.values())


def deleted() -> jax.Array:
    array = jnp.ones(2)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (deleted(), "a deleted array (was it donated?)"),
        (np.ma.array([1.0, 2.0], mask=[True, False], dtype=np.float32), "a masked array"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "an abstract array (ShapeDtypeStruct)"),
    ],
    ids=["deleted", "masked", "abstract"],
)
def test_what_is_not_data(value: Any, found: str) -> None:
    with pytest.raises(RestoreError) as caught:
        restore_state_dict({"w": jnp.ones(2)}, {"w": value})
    [mismatch] = caught.value.mismatches
    assert (mismatch.path, mismatch.kind, mismatch.found) == ("w", "value", found)


def test_what_cannot_be_written() -> None:
    twice = {"layers": OrderedDict([(1, 1.0), ("1", 2.0)])}
    with pytest.raises(StateDictError, match="`layers` has two keys named '1'"):
        to_state_dict(twice)
    tree: Any = jnp.ones(1)
    for _ in range(1000):
        tree = {"a": tree}
    with pytest.raises(StateDictError, match="nested too deeply"):
        to_state_dict(tree)
    with pytest.raises(StateDictError, match="nested too deeply"):
        restore_state_dict(tree, {})


def test_only_the_step_of_the_state_may_be_of_another_width() -> None:
    """A parameter that happens to be called `step` is as strict as any other."""
    optimizer = OptimizerDef(None)
    params, state = {"step": np.zeros((), np.uint8)}, OptimizerState(jnp.int32(0), ())
    saved = {"target": params, "state": {"step": np.int64(7), "param_states": {}}}
    assert int(optimizer.restore_state(params, state, saved)[1].step) == 7
    with pytest.raises(RestoreError, match="target/step: dtype"):
        optimizer.restore_state(params, state, saved | {"target": {"step": np.int64(7)}})
