"""Paths, gradients that match, and leaves with a buffer of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Layer, Momentum, Pair, arrays, assert_same, bits, given, trees
from flax.core import FrozenDict
from hypothesis import strategies as st
from opt_core import check_gradients
from opt_core.errors import TreeMismatchError
from opt_core.extend import (
    children,
    flatten_with_paths,
    path_names,
    path_str,
    split_path,
    strip_weak_type,
    unalias,
)


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, *items: Any) -> None:
        self.items = items

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.items, None

    @classmethod
    def tree_unflatten(cls, _: None, items: tuple[Any, ...]) -> "Box":
        return cls(*items)


def test_children_of_unnamed_nodes_are_numbered_and_leaves_have_none() -> None:
    opened = children(Box(5, 6))
    assert opened is not None
    assert opened.children == [("0", 5), ("1", 6)]
    for leaf in (None, 1.0, "text", object()):
        assert children(leaf) is None


@given(tree=trees)
def test_paths_are_those_of_jax(tree: Any) -> None:
    ours = list(flatten_with_paths(tree))
    theirs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    assert [names for names, _ in ours] == [path_names(path) for path, _ in theirs]
    assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))


names = st.lists(st.text("ab/~01."), max_size=4)


@given(one=names, other=names)
def test_different_names_have_different_paths(one: list[str], other: list[str]) -> None:
    # `.` is the root, which has no leaf beside it.
    paths = [path_str(names) for names in (one, other)]
    assert (paths[0] == paths[1]) == (one == other) or "." in paths
    if one not in (["."], []):
        assert split_path(paths[0]) == tuple(one)


A, B = jnp.ones(2), jnp.ones((2, 3))

DIFFERENT: list[tuple[Any, Any, list[str]]] = [
    ({"a": A}, FrozenDict(a=A), [".: expected a dict, found a FrozenDict"]),
    (Layer(A, bias=A), Layer(A), ["bias: expected an array of shape (2,), found None"]),
    ([A], (A,), [".: expected a list, found a tuple"]),
    (Pair(A, B), (A, B), [".: expected a Pair, found a tuple"]),
    ({"a": A}, {"a": A, "b": {}}, ["b: expected nothing, found a dict"]),
    ({"a": A}, {"a": None}, ["a: expected an array of shape (2,), found None"]),
    ({"a": None}, {"a": A}, ["a: expected None, found an array of shape (2,)"]),
    ({"a": A}, {"a": {"b": A}}, ["a: expected an array of shape (2,), found a dict"]),
    ({"a": ()}, {"a": A}, ["a: expected a tuple, found an array of shape (2,)"]),
    ({"a": A}, {"a": A + 0j}, ["a: expected a gradient of float32, found complex64"]),
    ({"a": A}, {"a": A > 0}, ["a: expected a gradient of float32, found bool"]),
    ({"a": A + 0j}, {"a": jnp.arange(2)}, ["a: expected a gradient of complex64, found int32"]),
    (
        {"a": A, "b": {"c": B, "d": A}, "e": A},
        {"a": B, "b": {"c": A, "f": A}, "e": A},
        [
            "a: expected shape (2,), found (2, 3)",
            "b/c: expected shape (2, 3), found (2,)",
            "b/d: expected an array of shape (2,), found nothing",
            "b/f: expected nothing, found an array of shape (2,)",
        ],
    ),
]


@pytest.mark.parametrize(("params", "grads", "lines"), DIFFERENT)
def test_every_difference_is_listed(params: Any, grads: Any, lines: list[str]) -> None:
    with pytest.raises(TreeMismatchError) as caught:
        check_gradients(params, grads)
    head, *found, _ = str(caught.value).splitlines()
    assert head == "`grads` do not match the parameters:"
    assert found == [f"  {line}" for line in lines]


def test_static_data_is_compared() -> None:
    check_gradients({1: A}, {1: B[:, 0]})
    with pytest.raises(TreeMismatchError, match=r"static data: expected .*1.*, found .*'1'"):
        check_gradients({1: A}, {"1": A})


@given(tree=trees)
def test_gradients_of_another_precision_are_accepted(tree: Any) -> None:
    check_gradients(tree, tree)
    check_gradients(tree, jax.tree.map(lambda x: np.zeros(x.shape, np.float16), tree))
    check_gradients(tree, jax.eval_shape(lambda: tree))


def test_it_costs_nothing_and_speaks_at_trace_time() -> None:
    optimizer = Momentum().create({"a": A})
    jaxpr = jax.make_jaxpr(lambda p, g: check_gradients(p, g))(optimizer.target, {"a": A})
    assert not jaxpr.eqns
    with pytest.raises(TreeMismatchError, match="expected a"):
        jax.eval_shape(lambda o: o.apply_gradient([A]), optimizer)


def pointers(tree: Any) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


@given(
    pool=st.lists(arrays, min_size=1, max_size=3),
    picks=st.lists(st.integers(0, 2), max_size=6),
    apart=st.lists(st.integers(0, 2), max_size=2),
)
def test_every_leaf_has_a_buffer_of_its_own(
    pool: list[Any], picks: list[int], apart: list[int]
) -> None:
    tree = [pool[i % len(pool)] for i in picks]
    others = [pool[i % len(pool)] for i in apart]
    result = unalias(tree, apart_from=others)
    assert_same(result, tree)
    found = pointers(result)
    assert len(set(found)) == len(found)
    assert not set(found) & set(pointers(others))


def test_what_shares_nothing_is_not_copied() -> None:
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    deleted = jnp.ones(2)
    deleted.delete()
    tree = {"a": jnp.ones(2), "b": (jnp.ones(2), None, np.ones(2), 1.0, shape, shape)}
    result = unalias(tree, apart_from=(jnp.ones(2), deleted))
    assert all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True))


def test_views_and_typed_keys_share_a_buffer_too() -> None:
    x, key = jnp.ones((2, 3)), jax.random.key(1)
    view = x.reshape(2, 3)
    assert pointers(x) == pointers(view)
    assert pointers(unalias(view, apart_from=x)) != pointers(x)
    first, second = unalias((key, key))
    assert first is key
    assert_same(second, key)
    assert pointers(jax.random.key_data(second)) != pointers(jax.random.key_data(key))


def test_weak_arrays_become_strong_and_all_else_is_left_alone() -> None:
    weak = jnp.asarray(1.5)
    assert weak.weak_type
    assert bits(strip_weak_type(weak)) == bits(jnp.float32(1.5))
    assert not jax.jit(strip_weak_type)(weak).weak_type
    assert not strip_weak_type(jax.eval_shape(lambda: jnp.asarray(1.5))).weak_type
    shape = jax.ShapeDtypeStruct((2,), jnp.int32)
    tree = [jnp.ones(2), np.ones(2), 1.5, jax.random.key(0), "text", shape]
    assert all(a is b for a, b in zip(strip_weak_type(tree), tree, strict=True))
