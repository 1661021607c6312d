from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Layer, Momentum, Pair, given, trees
from flax.core import FrozenDict
from opt_core import check_gradients
from opt_core.errors import TreeMismatchError

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
