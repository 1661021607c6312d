"""Logical axes of a wrapped optimizer, as T5X asks for them."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge
import optax
import pytest
from flax.core import FrozenDict, freeze
from jax.sharding import PartitionSpec as P
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

AXES = {"b": P("mlp"), "w": P("embed", "mlp")}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)


def make_params() -> dict[str, jax.Array]:
    return {"b": jnp.ones(4), "w": jnp.ones((3, 4))}


def is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, P)


def skeleton(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=is_leaf)


def derive(tx: Any, params: Any = None, axes: Any = None) -> Any:
    """The axes of the state, in its own containers."""
    optimizer = OptaxWrapper(tx).create(make_params() if params is None else params)
    derived = optimizer.optimizer_def.derive_logical_axes(optimizer, AXES if axes is None else axes)
    assert isinstance(derived, Optimizer)
    assert derived.state.step is None
    assert derived.optimizer_def is optimizer.optimizer_def
    assert skeleton(derived) == skeleton(optimizer), "other containers than the optimizer's own"
    return derived.state.param_states


@pytest.mark.parametrize("axes", [AXES, freeze(AXES)], ids=["dict", "Frozen"])
def test_dicts_of_either_kind_stand_for_one_another(axes: Any) -> None:
    definition = opt_optax_bridge.adam(0.1)
    optimizer = definition.create(freeze(make_params()))
    derived = definition.derive_logical_axes(optimizer, axes)
    for tree in (derived.target, derived.state.param_states[0].mu):
        assert isinstance(tree, FrozenDict)
        assert dict(tree) == AXES
    assert skeleton(derived) == skeleton(optimizer)


def test_moments_have_the_axes_of_their_parameters_and_counts_none() -> None:
    clip, (adam, decay, schedule) = derive(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))
    )
    assert clip == decay == optax.EmptyState()
    assert adam.mu == adam.nu == AXES
    assert adam.count is schedule.count is None
    assert derive(optax.trace(0.9), axes={"b": None, "w": P("embed", None)}).trace == {
        "b": None,
        "w": P("embed", None),
    }


def test_states_that_no_name_gives_away() -> None:
    """`apply_every`'s is called `ApplyEvery`; dicts and users' own are in nobody's list."""
    assert derive(optax.apply_every(2)).grad_acc == AXES
    tx = optax.GradientTransformation(lambda p: {"mine": [p, p]}, lambda u, s, p=None: (u, s))
    assert derive(tx) == {"mine": [AXES, AXES]}
