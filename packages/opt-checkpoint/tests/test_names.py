"""Names: stable under everything that does not change what a leaf means, and unique."""

from __future__ import annotations

import importlib
import json
from typing import Any, NamedTuple

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from checkpoint_testing import structure
from jax.sharding import PartitionSpec
from opt_checkpoint import Schema, errors, named_state, plan_restore, restore_named
from opt_core import FROZEN, MultiOptimizer, Optimizer
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define


def params() -> dict[str, Any]:
    return {"b": jnp.arange(3.0), "w": jnp.arange(6.0).reshape(2, 3)}


def wrapped(tx: Any, of: Any = None) -> Optimizer:
    return OptaxWrapper(tx).create(params() if of is None else of)


def names(optimizer: Optimizer) -> set[str]:
    return {name for name in named_state(optimizer) if name.startswith("state/")}


ADAM = {
    "state/step",
    "state/adam/count",
    *(f"state/adam/{moment}/{name}" for moment in ("mu", "nu") for name in ("b", "w")),
}
HEAVY = {f"state/trace/trace/{name}" for name in ("b", "w")}


def axes_of(optimizer: Any, param_axes: Any) -> dict[str, Any]:
    named = named_state(optimizer, param_axes=param_axes)
    assert Schema.from_data(json.loads(json.dumps(named.schema.to_data()))) == named.schema
    return {leaf.name: leaf.axes for leaf in named.schema.leaves}


def test_logical_axes_are_recorded_for_every_leaf() -> None:
    param_axes = {"b": PartitionSpec("mlp"), "w": PartitionSpec("embed", "mlp")}
    model = {f"params/{name}": tuple(spec) for name, spec in param_axes.items()}
    tx = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.trace(0.9))
    known = {name: axes for name, axes in axes_of(wrapped(tx), param_axes).items() if axes}
    assert known == {
        **model,
        "state/factored_rms/v_row/w": ("embed",),
        "state/factored_rms/v_col/w": ("mlp",),
        "state/factored_rms/v/b": ("mlp",),
        "state/trace/trace/b": ("mlp",),
        "state/trace/trace/w": ("embed", "mlp"),
    }
    groups = MultiOptimizer.from_rules([("w", opt.adam(0.1))], rest=FROZEN).create(params())
    found = axes_of(groups, param_axes)
    assert found["state/groups/0/adam/mu/w"] == ("embed", "mlp")
    assert found["params/b"] == ("mlp",)
    assert {leaf.axes for leaf in named_state(groups).schema.leaves} == {None}


def with_none() -> Any:
    def init(of: Any) -> Pair:
        return Pair(None, jax.tree.map(jnp.zeros_like, of))

    def update(updates: Any, state: Pair, of: Any = None) -> Any:
        return updates, state

    return optax.GradientTransformation(init, update)


def test_axes_beside_a_field_that_is_none() -> None:
    param_axes = {"b": PartitionSpec("mlp"), "w": PartitionSpec("embed", "mlp")}
    assert axes_of(wrapped(with_none()), param_axes)[f"state/{MINE}.with_none/second/b"] == ("mlp",)


def test_axes_for_other_parameters_are_an_error() -> None:
    with pytest.raises(ValueError, match="param_axes"):
        named_state(wrapped(optax.trace(0.9)), param_axes={"b": PartitionSpec("mlp")})


class Pair(NamedTuple):
    first: Any
    second: Any


def test_wrappers_do_not_change_names() -> None:
    adam = optax.adam(0.1)
    assert names(wrapped(adam)) == ADAM
    for tx in (
        optax.adamw(0.1),
        optax.chain(optax.clip(1.0), optax.chain(adam)),
        optax.named_chain(("z", optax.clip(1.0)), ("a", adam)),
        optax.with_extra_args_support(adam),
        optax.masked(adam, True),
        optax.masked(optax.masked(adam, True), True),
    ):
        assert names(wrapped(tx)) == ADAM
    for tx in (
        optax.MultiSteps(adam, 2),
        optax.apply_if_finite(adam, 3),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.conditionally_mask(adam, lambda step, **_: step > 0),
        optax.contrib.schedule_free(adam, 0.1),
    ):
        assert names(wrapped(tx)) > ADAM


def test_the_order_of_a_chain_does_not_change_names() -> None:
    adam, heavy, clip = optax.scale_by_adam(), optax.trace(0.9), optax.clip(1.0)
    for order in ([adam, heavy, clip], [clip, heavy, adam], [heavy, optax.chain(clip, adam)]):
        assert names(wrapped(optax.chain(*order))) == ADAM | HEAVY


def test_like_transformations_are_numbered_in_the_order_of_updates() -> None:
    first, second = optax.ema(0.9), optax.ema(0.99)
    chained = wrapped(optax.chain(first, second))
    named = wrapped(optax.named_chain(("z", first), ("a", second)))
    assert names(chained) == names(named)
    states = {"z": (chained.state.param_states[0]), "a": (chained.state.param_states[1])}
    counted = states["z"]._replace(count=jnp.int32(7))
    chained = chained.replace(state=chained.state.replace(param_states=(counted, states["a"])))
    restored = plan_restore(named_state(chained), named).apply()
    assert int(restored.state.param_states["z"].count) == 7


def test_a_transformation_without_leaves_counts_among_its_like() -> None:
    nothing = optax.masked(optax.trace(0.9), {"b": False, "w": False})
    assert names(wrapped(optax.chain(nothing, optax.trace(0.9)))) == {
        "state/step",
        "state/trace#2/trace/b",
        "state/trace#2/trace/w",
    }


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


def test_a_group_may_be_called_frozen() -> None:
    table = MultiOptimizer.from_rules([("frozen", "w", opt.adam(0.1))], rest=FROZEN)
    schema = named_state(table.create(params())).schema
    assert schema.groups == {"frozen": (("w",),), "~frozen": (("b",),)}


def test_states_of_every_origin_have_the_same_names() -> None:
    optimizer = wrapped(optax.chain(optax.clip(1.0), optax.adamw(0.1)))
    expected = named_state(optimizer)
    compiled = jax.jit(lambda o: o.apply_gradient(o.target))(optimizer)
    abstract = jax.eval_shape(lambda: optimizer)
    assert list(named_state(compiled)) == list(named_state(abstract)) == list(expected)
    assert named_state(abstract).schema.transformations == expected.schema.transformations
    inside = []
    jax.jit(lambda o: inside.append(list(named_state(o))))(optimizer)
    assert inside == [list(expected)]


_SHARED = jnp.ones(3)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "tree",
    [
        _SHARED,
        {"tied": _SHARED, "to": _SHARED},
        {},
        {"a": {}, "b": ()},
        {"a": None, "b": jnp.ones(2)},
        {0: jnp.ones(2), 10: jnp.ones(3)},
        {"a/b": jnp.ones(1), "a": {"b": jnp.ones(2)}, "a.b": jnp.ones(3), "~1": jnp.ones(4)},
        {"": jnp.ones(1), "..": jnp.ones(2), "\n\x00é": jnp.ones(3)},
        flax.core.freeze({"a": {"b": jnp.ones(2)}}),
        [jnp.ones(2), {"k": jnp.ones(2)}, jnp.ones(2)],
        (jnp.ones(2), jnp.ones(2)),
        Pair(jnp.ones(2), {"z": jnp.ones(1)}),
        {"a": jnp.zeros((0, 3)), "b": jnp.float32(2.0)},
    ],
    ids=lambda tree: str(structure(tree)),
)
def test_parameters_of_every_kind(tree: Any) -> None:
    assert_comes_back(wrapped(optax.chain(optax.clip(1.0), optax.adam(0.1)), tree))


def assert_comes_back(optimizer: Optimizer) -> None:
    """From a named state, from its bare leaves, and from NumPy; nothing is shared."""
    named = named_state(optimizer)
    assert len(named) == len(jax.tree.leaves(optimizer))
    for given in (named, dict(named), {name: np.asarray(leaf) for name, leaf in named.items()}):
        restored = restore_named(optimizer, given)
        assert structure(restored) == structure(optimizer)
        pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(optimizer), strict=True)
        for new, old in pairs:
            assert isinstance(new, jax.Array)
            assert new.dtype == old.dtype
            np.testing.assert_array_equal(np.asarray(new), np.asarray(old))
        jax.tree.map(lambda x: x.delete(), restored)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(optimizer))


def test_a_name_that_is_there_twice_is_an_error() -> None:
    @jax.tree_util.register_pytree_with_keys_class
    class Twice:
        def __init__(self, *leaves: Any) -> None:
            self.leaves = leaves

        def tree_flatten_with_keys(self) -> Any:
            key = jax.tree_util.GetAttrKey("same")
            return [(key, leaf) for leaf in self.leaves], None

        @classmethod
        def tree_unflatten(cls, _: Any, leaves: Any) -> Any:
            return cls(*leaves)

    tx = optax.GradientTransformation(
        lambda _: Twice(jnp.ones(1), jnp.ones(2)), lambda u, s, p: (u, s)
    )
    with pytest.raises(errors.LeafError, match=f"would have the name `state/{MINE}.twice/same`"):
        named_state(wrapped(tx))
