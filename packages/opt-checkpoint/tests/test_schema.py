from __future__ import annotations

import copy
import json
from typing import Any

import jax.numpy as jnp
import opt_optax_bridge as opt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opt_checkpoint import (
    Schema,
    errors,
    leaf_name,
    leaf_path,
    named_state,
)
from opt_core import FROZEN, MultiOptimizer

PARTS = st.text(alphabet=st.one_of(st.sampled_from("~/.01%a"), st.characters(codec="utf-8")))
PATHS = st.lists(PARTS, min_size=1, max_size=5).map(tuple)


@given(PATHS)
def test_names_and_paths_are_inverse(path: tuple[str, ...]) -> None:
    assert leaf_path(leaf_name(path)) == path


@given(PATHS, PATHS)
def test_no_two_paths_share_a_name(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (leaf_name(one) == leaf_name(other)) == (one == other)


def real() -> Any:
    table = MultiOptimizer.from_rules([("fast", "w", opt.adam(0.1))], rest=FROZEN)
    optimizer = table.create({"w": jnp.ones((2, 3)), "b": jnp.ones(1)})
    return json.loads(json.dumps(named_state(optimizer).schema.to_data()))


def edited(*path: Any, value: Any) -> Any:
    data = copy.deepcopy(real())
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("leaves",), None, "schema/leaves"),
        (("leaves", 1), 7, "schema/leaves/1"),
        (("leaves", 1, "path"), "params/w", "schema/leaves/1/path"),
        (("leaves", 1, "path"), ["params", 3], "schema/leaves/1/path/1"),
        (("leaves", 1, "path"), ["params", "b"], "schema/leaves/1/path"),
        (("leaves", 1, "shape"), [2, -3], "schema/leaves/1/shape/1"),
        (("leaves", 1, "dtype"), "float33", "schema/leaves/1/dtype"),
        (("leaves", 1, "kind"), "parameter", "schema/leaves/1/kind"),
        (("leaves", 1, "value"), 1.5, "schema/leaves/1/value"),
        (("leaves", 1, "pickle"), "x", "schema/leaves/1"),
        (("optimizer", 0, "settings"), [1], "schema/optimizer/0/settings"),
        (("groups", "fast"), [["w", None]], "schema/groups/fast/0/1"),
        (("versions", "jax"), 1, "schema/versions/jax"),
        (("extra",), 1, "schema"),
    ],
)
def test_what_is_malformed_is_named(path: tuple[Any, ...], value: Any, where: str) -> None:
    with pytest.raises(errors.LoadError, match=f"^`{where}`: "):
        Schema.from_data(edited(*path, value=value))


@pytest.mark.parametrize("data", [None, []])
def test_what_is_no_mapping_is_no_schema(data: Any) -> None:
    with pytest.raises(errors.LoadError, match=r"^`schema`: expected a mapping"):
        Schema.from_data(data)
