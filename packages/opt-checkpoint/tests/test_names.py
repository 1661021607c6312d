"""Names: stable under everything that does not change what a leaf means, and unique."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from checkpoint_testing import structure
from opt_checkpoint import errors, named_state, plan_restore
from opt_core import FROZEN, MultiOptimizer, Optimizer
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")


def params() -> dict[str, Any]:
    return {"b": jnp.arange(3.0), "w": jnp.arange(6.0).reshape(2, 3)}


def wrapped(tx: Any, of: Any = None) -> Optimizer:
    return OptaxWrapper(tx).create(params() if of is None else of)


def names(optimizer: Optimizer) -> set[str]:
    return {name for name in named_state(optimizer) if name.startswith("state/")}


class Pair(NamedTuple):
    first: Any
    second: Any


def test_groups_are_in_the_names() -> None:
    adam = opt.adam(0.1)
    table = MultiOptimizer.from_rules([("fast", "w", adam)], rest=FROZEN)
    expected = {f"state/groups/fast/adam/{x}" for x in ("count", "mu/w", "nu/w")}
    assert names(table.create(params())) == expected | {"state/step"}
    labels = {"b": "slow", "w": "fast"}
    tx = optax.partition({"fast": optax.adam(0.1), "slow": optax.set_to_zero()}, labels)
    assert names(wrapped(tx)) == expected | {"state/step"}
    nested = MultiOptimizer.from_rules([("outer", ".*", OptaxWrapper(tx))]).create(params())
    assert "state/groups/outer/groups/fast/adam/mu/w" in names(nested)
    schema = named_state(table.create(params())).schema
    assert schema.groups == {"fast": (("w",),), "frozen": (("b",),)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "tree",
    [
        jnp.ones(3),
        {"a": {}, "b": ()},
        {"a": None, "b": jnp.ones(2)},
        {0: jnp.ones(2), 10: jnp.ones(3)},
        {"a/b": jnp.ones(1), "a": {"b": jnp.ones(2)}, "a.b": jnp.ones(3), "~1": jnp.ones(4)},
        {"": jnp.ones(1), "..": jnp.ones(2), "\n\x00é": jnp.ones(3)},
        flax.core.freeze({"a": {"b": jnp.ones(2)}}),
        [jnp.ones(2), Pair(jnp.ones(2), {"z": jnp.ones(1)}), (jnp.zeros((0, 3)), jnp.float32(2.0))],
    ],
    ids=lambda tree: str(structure(tree)),
)
def test_parameters_of_every_kind(tree: Any) -> None:
    """They come back from a named state and from NumPy; nothing is shared."""
    optimizer = wrapped(optax.chain(optax.clip(1.0), optax.adam(0.1)), tree)
    named = named_state(optimizer)
    assert len(named) == len(jax.tree.leaves(optimizer))
    for restored in (
        plan_restore(named, optimizer).apply(),
        plan_restore({name: np.asarray(leaf) for name, leaf in named.items()}, optimizer).apply(),
        plan_restore(named, optimizer, rules=[(".*", "keep")]).apply(),
    ):
        assert structure(restored) == structure(optimizer)
        pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(optimizer), strict=True)
        for new, old in pairs:
            assert new.dtype == old.dtype
            np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
        jax.tree.map(lambda x: x.delete(), restored)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(optimizer))


def test_a_name_that_is_there_twice_is_an_error() -> None:
    tx = optax.GradientTransformation(
        lambda _: OrderedDict([(1, jnp.ones(1)), ("1", jnp.ones(2))]), lambda u, s, p: (u, s)
    )
    with pytest.raises(
        errors.LeafError, match="two leaves would have the name `state/optax_wrapper/1`"
    ):
        named_state(wrapped(tx))
