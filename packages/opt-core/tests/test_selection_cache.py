"""How trees are divided: states that belong to the division, and patterns that fail."""

import copy
import itertools
import re
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from core_testing import Momentum, assert_same
from jax.sharding import PartitionSpec
from opt_core import (
    FROZEN,
    GroupStates,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    increment_step,
    path_str,
)
from opt_core.errors import GroupError

PARAMS = {
    "decoder": {"wi": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "norm": jnp.ones(2)},
    "embed": jnp.ones((4, 2)),
}


def test_a_pattern_by_rank_does_not_swap_trained_groups() -> None:
    """Created under `vmap`, used outside: every leaf is trained, each by the other's definition."""
    params = {"kernel": jnp.ones((2, 2, 3)), "bias": jnp.ones((2, 3))}
    by_rank = ("matrices", lambda path, leaf: leaf.ndim == 2, Momentum(0.1))
    definition = MultiOptimizer.from_rules([by_rank], rest=Momentum(0.5))
    optimizer = jax.vmap(definition.create)(params)
    stepped = jax.vmap(lambda o, g: o.apply_gradient(g))(optimizer, params)
    uses: list[Any] = [
        lambda o: o.apply_gradient(params),
        lambda o: o.state_dict(),
        lambda o: o.optimizer_def.select(o.target),
        jax.jit(lambda o: o.apply_gradient(params)),
    ]
    for o, use in itertools.product((optimizer, stepped), uses):
        with pytest.raises(GroupError, match=r"`bias`: created in `rest` .*, now in `matrices` \("):
            use(o)
    with pytest.raises(GroupError, match="created in"):
        copy.deepcopy(definition).select(optimizer.target)
    # Where an optimizer is created for these shapes, the same definition divides them again.
    other = definition.create(params)
    assert int(other.apply_gradient(params).state.step) == 1
    assert int(jax.vmap(lambda o: o.apply_gradient(o.target))(optimizer).state.step[0]) == 1


class KeepsMatrices(OptimizerDef):
    """A state for matrices, `None` for everything else."""

    def init_state(self, params: Any) -> OptimizerState:
        states = jax.tree.map(lambda p: jnp.zeros_like(p) if p.ndim > 1 else None, params)
        return OptimizerState(jnp.zeros((), jnp.int32), states)

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        params = jax.tree.map(lambda p, g: p - g, params, grads)
        return params, state.replace(step=increment_step(state.step))


@pytest.mark.parametrize(
    "inner",
    [KeepsMatrices(None), MultiOptimizer.from_rules([(".*kernel", Momentum())], rest=FROZEN)],
)
def test_a_definition_may_keep_nothing_for_some(inner: OptimizerDef) -> None:
    params = {"a": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "b": jnp.ones(3)}
    definition = MultiOptimizer.from_rules([("a/.*", inner), ("b", Momentum())])
    optimizer = jax.jit(lambda o: o.apply_gradient(params))(definition.create(params))
    optimizer = optimizer.apply_gradient(params)
    assert int(optimizer.state.step) == 2
    written = optimizer.state_dict()
    assert written["state"]["param_states"]["a"]["bias"] is None
    assert_same(definition.create(params).restore_state(written), optimizer)
    inner_states: Any = {"a": {"kernel": None, "bias": None}}
    if isinstance(inner, MultiOptimizer):
        inner_states = GroupStates({"0": {"a": {"kernel": None}}})
    states = GroupStates({"0": inner_states, "1": {"b": jnp.ones(3)}})
    with pytest.raises(GroupError, match=r"`a/kernel` of `0` .* has none"):
        Optimizer(definition, OptimizerState(0, states), params).apply_gradient(params)


def test_keys_of_one_name_are_refused() -> None:
    params = OrderedDict([(1, {"w": jnp.ones(2)}), ("1", {"w": jnp.zeros(3)})])
    with pytest.raises(GroupError, match=r"`\[1\].*` and `\['1'\].*` have the same path, `1"):
        MultiOptimizer.from_rules([("1.*", Momentum())]).create(params)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (lambda path: True, "<lambda>: .* A pattern is a function of `\\(path, leaf\\)`"),
        (lambda path, leaf: float(leaf) > 0, "<lambda>: .*never its values"),
        (lambda path, leaf: "norms", "returns 'norms' for `decoder/norm`: a pattern says whether"),
        (re.compile(b".*"), "b'.\\*': paths are text, not bytes"),
    ],
)
def test_patterns_that_fail_are_named(pattern: Any, words: str) -> None:
    with pytest.raises(GroupError, match=words):
        MultiOptimizer.from_rules([(pattern, Momentum())], rest=FROZEN).create(PARAMS)


def test_axes_must_know_every_parameter() -> None:
    axes = {"w": PartitionSpec("embed")}
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    definition = MultiOptimizer.from_rules([({"embed"}, Momentum())], rest=FROZEN, param_axes=axes)
    with pytest.raises(
        GroupError, match=r"axes embed: `param_axes` have nothing for `b`. Give one"
    ):
        definition.create(params)


def test_leaves_that_are_not_arrays() -> None:
    params = {"w": 1.0, "b": jnp.ones(3), "act": jax.nn.relu}
    by_rank = MultiOptimizer.from_rules(
        [(lambda path, leaf: leaf.ndim == 1, Momentum())], rest=FROZEN
    )
    selection = by_rank.select({"w": 1.0, "b": jnp.ones(3)})
    assert [path_str(selection.paths[i]) for i in selection.parts[0].members] == ["b"]
    with pytest.raises(
        GroupError, match=r"`ndim` of `act`, which is not an array but a .*: decide by"
    ):
        by_rank.create(params)
