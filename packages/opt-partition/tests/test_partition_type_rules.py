"""Rules by type, and what the other sources leave to them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from opt_partition import ASK, Rules, StateLeaf, derive_logical_axes, explain

f32 = jnp.float32


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, f32)


class Gram(NamedTuple):
    """Two dimensions of a size, only one of which indexes rows."""

    gram: Any


def gram_init(params: Any) -> Gram:
    return Gram(jax.tree.map(lambda p: jnp.zeros(p.shape[:1] * 2), params))


PARAMS = {"w": shape(5, 3)}
AXES = {"w": P("embed", "mlp")}


def test_a_rule_may_name_the_axes() -> None:
    rules = {Gram: lambda leaf: P("rows", None)}
    assert derive_logical_axes(gram_init, PARAMS, AXES, rules=rules).gram["w"] == P("rows", None)


def test_a_rule_may_leave_dimensions_or_leaves_to_the_others() -> None:
    half: Rules = {Gram: lambda leaf: (ASK, None)}
    [row] = explain(gram_init, PARAMS, AXES, rules=half).rows
    assert row.axes == ("embed", None)
    assert row.sources == ("symbols", "rule")
    silent: Rules = {Gram: lambda leaf: None}
    found = derive_logical_axes(gram_init, PARAMS, AXES, rules=silent)
    assert found.gram["w"] == P("embed", "embed")


def test_what_a_rule_is_given() -> None:
    given: list[StateLeaf] = []

    def rule(leaf: StateLeaf) -> None:
        given.append(leaf)

    tx = optax.chain(optax.clip(1.0), optax.GradientTransformation(gram_init, lambda *a: a))
    explain(tx, PARAMS, AXES, rules={Gram: rule})
    [leaf] = given
    assert isinstance(leaf.state, Gram)
    assert (leaf.field, leaf.shape, leaf.dtype) == ("gram", (5, 5), f32)
    assert leaf.parameter is not None
    assert (leaf.parameter.path, leaf.parameter.shape) == ("w", (5, 3))
    assert leaf.parameter.axes == ("embed", "mlp")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((0,), r"the rule for Gram/gram/w of shape \(5, 5\) returned \(0,\)"),
        ((0, 1), "no dimension of size 5 is parameter dimension 1"),
        ((True, None), "is parameter dimension True"),
        ("embed", "the rule for Gram/gram/w .* expected a tuple"),
    ],
)
def test_answers_that_mean_nothing(answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        explain(gram_init, PARAMS, AXES, rules={Gram: lambda leaf: answer})


def test_the_outer_type_is_asked_first_and_the_inner_one_after() -> None:
    class Outer(NamedTuple):
        inner: Any

    def init(params: Any) -> Outer:
        return Outer(gram_init(params))

    asked = []

    def outer(leaf: StateLeaf) -> Any:
        asked.append(("outer", leaf.key_path[0].name))
        return None

    def inner(leaf: StateLeaf) -> Any:
        asked.append(("inner", leaf.key_path[0].name))
        return np.argmax(leaf.parameter.shape if leaf.parameter else ()), None

    axes = derive_logical_axes(init, PARAMS, AXES, rules={Outer: outer, Gram: inner})
    assert axes.inner.gram["w"] == P("embed", None)
    assert asked == [("outer", "inner"), ("inner", "gram")]
