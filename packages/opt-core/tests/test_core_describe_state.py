"""What is said of states whose definition says nothing, of groups, and how often it is asked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from core_testing import Momentum
from jax.sharding import PartitionSpec
from opt_core import (
    LeafDescription,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    StateDescription,
    TransformationDescription,
    describe_state,
)
from opt_core.errors import DescriptionError

MINE = __name__.partition(".")[0]  # the package of what these tests define


def params() -> dict[str, Any]:
    return {"b": jnp.ones(3), "w": jnp.ones((2, 3))}


class Slots(NamedTuple):
    row: Any
    col: Any
    full: Any
    counts: Any


class MomentumState(NamedTuple):
    trace: Any
    count: Any


class Records(OptimizerDef):
    """Records in a tuple, two of them alike; a slot per parameter."""

    def init_state(self, tree: Any) -> OptimizerState:
        slots = jax.tree.map(
            lambda p: Slots(p.sum(-1), p.sum(0), p, p.astype(jnp.int32)), {"w": tree["w"]}
        )
        moments = MomentumState(jax.tree.map(jnp.copy, tree), jnp.int32(0))
        return OptimizerState(jnp.int32(0), (moments, moments, [jax.random.key(0)], {"s": slots}))


class Stating(Momentum):
    """Says that it keeps velocities, and counts how often it is asked."""

    asked = 0

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        type(self).asked += 1
        names = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        leaves = [
            LeafDescription(
                (str(p[0].key),), (), "velocity", 1, (), (str(p[0].key),), None, "moment", "stated"
            )
            for p in names
        ]
        return StateDescription(tuple(leaves), (TransformationDescription("velocity"),))


def rows(found: StateDescription) -> list[Any]:
    return [(x.transformation, x.number, x.field, x.parameter, x.dimensions) for x in found.leaves]


def test_the_default_goes_by_records_shapes_and_dtypes() -> None:
    tree = params()
    found = describe_state(Records(None).create(tree))
    assert rows(found) == [
        (f"{MINE}.momentum", 1, ("trace",), ("b",), (0,)),
        (f"{MINE}.momentum", 1, ("trace",), ("w",), (0, 1)),
        (f"{MINE}.momentum", 1, ("count",), None, ()),
        (f"{MINE}.momentum", 2, ("trace",), ("b",), (0,)),
        (f"{MINE}.momentum", 2, ("trace",), ("w",), (0, 1)),
        (f"{MINE}.momentum", 2, ("count",), None, ()),
        (f"{MINE}.records", 1, ("2", "0"), None, ()),
        (f"{MINE}.records", 1, ("3", "s", "row"), ("w",), (0,)),
        (f"{MINE}.records", 1, ("3", "s", "col"), ("w",), (1,)),
        (f"{MINE}.records", 1, ("3", "s", "full"), ("w",), (0, 1)),
        (f"{MINE}.records", 1, ("3", "s", "counts"), ("w",), (0, 1)),
    ]
    roles = [leaf.role for leaf in found.leaves]
    last = ["factored", "factored", "moment", "other"]
    assert roles == [*("moment", "moment", "count") * 2, "key", *last]
    assert {leaf.source for leaf in found.leaves} == {"types"}
    assert [(made.name, made.number) for made in found.transformations] == [
        (f"{MINE}.records", 1),
        (f"{MINE}.momentum", 1),
        (f"{MINE}.momentum", 2),
    ]


def test_a_definition_that_derives_axes_says_which_dimensions_are_kept() -> None:
    class Columns(OptimizerDef):
        def init_state(self, tree: Any) -> OptimizerState:
            return OptimizerState(jnp.int32(0), jax.tree.map(lambda p: (p.sum(0), None), tree))

        def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
            axes = jax.tree.map(
                lambda spec: (PartitionSpec(*spec[1:]), None),
                param_axes,
                is_leaf=lambda x: isinstance(x, PartitionSpec),
            )
            return optimizer.replace(state=OptimizerState(None, axes))

    found = describe_state(Columns(None).create({"w": jnp.ones((3, 3))}))
    assert [leaf.dimensions for leaf in found.leaves] == [(1,)]


def test_a_definition_that_describes_its_state_is_asked_once() -> None:
    definition = Stating()
    optimizer = definition.create(params())
    found = describe_state(optimizer)
    assert [leaf.source for leaf in found.leaves] == ["stated", "stated"]
    again = Stating().create(params())  # an equal one
    assert describe_state(again) is found
    assert describe_state(jax.eval_shape(lambda: optimizer)) is found
    assert describe_state(definition, optimizer.target, optimizer.state) is found
    traced: list[Any] = []
    jax.jit(lambda o: traced.append(describe_state(o)))(optimizer)
    assert traced == [found]
    assert Stating.asked == 1
    describe_state(definition.create({"b": jnp.ones(4)}))
    describe_state(Stating(0.25).create(params()))
    assert Stating.asked == 3


def test_a_definition_that_forgets_leaves_is_an_error() -> None:
    class Short(Momentum):
        def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
            return StateDescription((), ())

    with pytest.raises(DescriptionError, match="of Short: expected 2 leaves, one per leaf"):
        describe_state(Short().create(params()))
