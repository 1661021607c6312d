"""One leaf has one path, whichever package shows it, and no other leaf has the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import opt_accumulate
import opt_core
import opt_legacy_stax
import optax
import pytest
from opt_adafactor import Adafactor
from opt_checkpoint import named_state
from opt_core.extend import flatten_with_paths, path_str
from opt_optax_bridge import OptaxWrapper
from opt_partition import explain

PARAMS = {"a/b": {"c": jnp.ones((2, 3))}, "a": {"b/c": jnp.ones((2, 3)), "~": jnp.ones(3), "": 1.0}}
PATHS = ["a/", "a/b~1c", "a/~0", "a~1b/c"]


def test_a_table_tells_keys_with_slashes_apart() -> None:
    assert [path_str(names) for names, _ in flatten_with_paths(PARAMS)] == PATHS
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
        [(names, _)] = [(n, x) for n, x in flatten_with_paths(one.target) if x is not None]
        assert path_str(names) == path


def test_checkpoints_have_the_same_names() -> None:
    names = named_state(OptaxWrapper(optax.sgd(0.1)).create(jax.tree.map(jnp.asarray, PARAMS)))
    assert [name for name in names if name.startswith("params/")] == [f"params/{p}" for p in PATHS]


def test_errors_have_the_same_paths() -> None:
    params = jax.tree.map(jnp.asarray, PARAMS)
    grads = jax.tree.map(jnp.ones_like, params)
    grads["a"]["b/c"] = jnp.ones((5, 2, 3))
    triple = opt_legacy_stax.sgd(0.1)
    steps = opt_accumulate.MultiSteps(optax.sgd(0.1), 2)
    for update in (
        lambda: triple.update_fn(0, grads, triple.init_fn(params)),
        lambda: steps.update(grads, steps.init(params), params),
    ):
        with pytest.raises((TypeError, ValueError), match=r"[ `]a/b~1c[`:]"):
            update()
