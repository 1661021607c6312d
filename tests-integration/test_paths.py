"""One leaf has one path, whichever package shows it, and no other leaf has the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import opt_accumulate._trees
import opt_core
import opt_legacy_stax._trees
import opt_partition._trees
import optax
import pytest
from hypothesis import given
from opt_adafactor import Adafactor
from opt_checkpoint._naming.schema import leaf_name
from opt_optax_bridge import OptaxWrapper
from opt_partition import explain

FUNCTIONS: dict[str, Callable[[Any], str]] = {
    "opt-core": lambda path: opt_core.path_str(opt_core.path_names(path)),
    "opt-partition": opt_partition._trees.path_str,
    "opt-accumulate": opt_accumulate._trees.path_str,
    "opt-legacy-stax": opt_legacy_stax._trees.path_str,
    "checkpoints": lambda path: leaf_name(opt_core.path_names(path)),
}

keys = st.text("a/~01", max_size=3)
trees = st.recursive(
    st.just(0),
    lambda inner: (
        st.dictionaries(keys, inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
).filter(lambda tree: tree != 0)


@given(trees)
def test_all_packages_have_the_same_paths(tree: Any) -> None:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    expected = [FUNCTIONS["opt-core"](path) for path in paths]
    assert len({*expected}) == len(expected)
    for name, path_of in FUNCTIONS.items():
        assert [path_of(path) for path in paths] == expected, name


PARAMS = {"a/b": {"c": jnp.ones((2, 3))}, "a": {"b/c": jnp.ones((2, 3)), "~": jnp.ones(3), "": 1.0}}
PATHS = ["a/", "a/b~1c", "a/~0", "a~1b/c"]


def test_a_table_tells_keys_with_slashes_apart() -> None:
    rows = explain(optax.trace(0.9), PARAMS, jax.tree.map(lambda _: None, PARAMS)).rows
    assert [row.parameter for row in rows] == PATHS
    assert [row.path for row in rows] == [f"trace/{path}" for path in PATHS]


@pytest.mark.parametrize("make", [Adafactor, lambda: OptaxWrapper(optax.sgd(0.1))])
def test_patterns_match_the_paths_that_are_shown(make: Any) -> None:
    params = jax.tree.map(jnp.asarray, PARAMS)
    for path in PATHS:
        groups = opt_core.MultiOptimizer.from_rules([("one", path, make())], rest=make())
        optimizer = groups.create(params)
        one = groups.split(optimizer)["one"]
        [(names, _)] = [(n, x) for n, x in opt_core.flatten_with_paths(one.target) if x is not None]
        assert opt_core.path_str(names) == path
