"""Paths, gradients that match, and leaves with a buffer of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Layer, Momentum, Pair, arrays, assert_same, given, trees
from hypothesis import strategies as st
from opt_core import check_gradients
from opt_core.errors import TreeMismatchError
from opt_core.extend import path_str, split_path, unalias

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
    (Layer(A, bias=A), Layer(A), ["bias: expected an array of shape (2,), found None"]),
    (Pair(A, B), (A, B), [".: expected a Pair, found a tuple"]),
    ({"a": None}, {"a": A}, ["a: expected None, found an array of shape (2,)"]),
    ({"a": A}, {"a": {"b": A}}, ["a: expected an array of shape (2,), found a dict"]),
    ({"a": A}, {"a": A + 0j}, ["a: expected a gradient of float32, found complex64"]),
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
