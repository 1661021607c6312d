"""State that is kept in the order of the parameters and not under their names.

The oracle is `init` itself on parameters all of whose sizes differ: there a size tells the
dimension that it came from, and equal sizes must not change what is found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import PartitionSpec
from opt_partition import explain
from opt_partition._trees import path_str

Tree = Any
Init = Callable[[Tree], Tree]


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def names(params: Tree) -> Tree:
    """A name of its own for every dimension."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: PartitionSpec(*(f"{path_str(path)}:{d}" for d in range(leaf.ndim))),
        params,
    )


def names_by_unique_sizes(
    init: Init, params: Tree, limit: int = 0
) -> dict[str, tuple[str | None, ...]]:
    """The names of the state that `init` makes where no two sizes are equal.

    Sizes stay at the side of `limit` that they are at, which may make a difference to `init`.
    """
    above, below = itertools.count(limit + 1000), itertools.count(limit, -1)
    unique = jax.tree.map(
        lambda p: struct(*(next(above if size > limit else below) for size in p.shape)), params
    )
    by_size = {
        size: f"{path_str(path)}:{dim}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(unique)
        for dim, size in enumerate(leaf.shape)
    }
    state = jax.eval_shape(init, unique)
    return {
        path_str(path): tuple(by_size.get(size) for size in leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def check(init: Init, params: Tree, limit: int = 0) -> None:
    rows = explain(init, params, names(params), strict=True).rows
    assert {row.path: row.axes for row in rows} == names_by_unique_sizes(init, params, limit)
    for row in rows:  # the parameter is the right one, too
        owners = {str(axis).rpartition(":")[0] for axis in row.axes if axis is not None}
        assert owners <= {row.parameter}


# What an optimizer may keep of one parameter.
STATISTICS: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "momentum": lambda shape: shape,
    "left": lambda shape: (*shape[:1], *shape[:1]),
    "right": lambda shape: (*shape[-1:], *shape[-1:]),
    "transposed": lambda shape: shape[::-1],
    "rows": lambda shape: shape[:-1],
    "columns": lambda shape: shape[1:],
    "history": lambda shape: (3, *shape),
    "norm": lambda shape: (),
    "placeholder": lambda shape: (1,),
}


def of(name: str) -> Callable[[Any], jax.Array]:
    # Made of nothing but the shape.
    return lambda parameter: jnp.zeros(STATISTICS[name](parameter.shape))


def lists(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return {name: [of(name)(leaf) for leaf in leaves] for name in kept}


def tuples(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return [tuple(of(name)(leaf) for name in kept) for leaf in leaves]


def numbered(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return {name: {i: of(name)(leaf) for i, leaf in enumerate(leaves)} for name in kept}


def spelled(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return {name: {str(i): of(name)(leaf) for i, leaf in enumerate(leaves)} for name in kept}


def concatenated(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return [of(name)(leaf) for name in kept for leaf in leaves]


def matrices_only(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return lists([leaf for leaf in leaves if len(leaf.shape) > 1], kept)


def every_other(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return lists(leaves[::2], kept)


def backwards(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return lists(leaves[::-1], kept)


def chained(leaves: Sequence[Any], kept: Sequence[str]) -> Tree:
    return tuple(([of(name)(leaf) for leaf in leaves], jnp.zeros((), jnp.int32)) for name in kept)


LAYOUTS = [
    lists,
    tuples,
    numbered,
    spelled,
    concatenated,
    matrices_only,
    every_other,
    backwards,
    chained,
]

# Most sizes repeat, and none is near enough to a limit for a probe to cross one.
shapes = st.lists(st.sampled_from([8, 8, 8, 5, 64]), max_size=3).map(lambda s: struct(*s))


def containers(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    keys = st.sampled_from(["kernel", "bias", "0", "1", "L", "momentum"])
    return st.one_of(
        st.dictionaries(keys, inner, min_size=1, max_size=4),
        st.lists(inner, min_size=1, max_size=4),
    )


trees = st.recursive(shapes, containers, max_leaves=16)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    trees,
    st.sampled_from(LAYOUTS),
    st.permutations(sorted(STATISTICS)),
    st.integers(1, 3),
    st.booleans(),
)
def test_equal_sizes_do_not_change_what_is_found(
    params: Tree, layout: Any, kept: list[str], number: int, has_named: bool
) -> None:
    def init(p: Tree) -> Tree:
        flat = layout(jax.tree.leaves(p), kept[:number])
        return (flat, jax.tree.map(of(kept[-1]), p)) if has_named else flat

    check(init, params)


SQUARES = [struct(64, 64), struct(64, 128), struct(128, 64), struct(128, 128), struct(64)] * 3


@pytest.mark.parametrize("limit", [64, 127], ids=["most", "least"])
@pytest.mark.parametrize("other", [(1,), ()], ids=["vector", "scalar"])
def test_sizes_at_a_limit(limit: int, other: tuple[int, ...]) -> None:
    """As a preconditioner of a limited size: growing, or shrinking, makes another leaf of it."""

    def init(params: Tree) -> Tree:
        leaves = jax.tree.leaves(params)

        def is_at(n: int) -> bool:
            return n <= limit if limit == 64 else n > limit

        return {
            name: [jnp.zeros((n, n) if is_at(n := p.shape[dim]) else other) for p in leaves]
            for name, dim in (("left", 0), ("right", -1))
        }

    check(init, {"w": SQUARES}, limit)
