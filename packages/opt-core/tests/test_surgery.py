"""Changing the groups of an optimizer, and what becomes of its state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from core_testing import Momentum, Whole, advanced, assert_same, given, structure
from flax_optim import Adam, GradientDescent
from hypothesis import strategies as st
from opt_core import (
    FROZEN,
    GroupStates,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    Plan,
    freeze,
    regroup,
    reset,
    unfreeze,
)
from opt_core.errors import GroupError, SurgeryError
from opt_core.extend import flatten_with_paths


def make_params() -> Any:
    return {
        "a": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
        "b": {"kernel": jnp.ones((3, 2)), "scale": jnp.ones(2)},
    }


def groups(*rules: Any, rest: Any = FROZEN) -> MultiOptimizer:
    return MultiOptimizer.from_rules(rules, rest=rest)


KERNELS = ("kernels", ".*kernel", Momentum())
BIASES = ("biases", ".*bias", Adam(0.1))


def table(optimizer: Optimizer) -> list[str]:
    definition = optimizer.optimizer_def
    assert isinstance(definition, MultiOptimizer)
    return [group.name for group in definition.groups]


class Summary(NamedTuple):
    kept: tuple[str, ...]
    initialised: tuple[str, ...]
    dropped: tuple[str, ...]


def summary(plan: Plan[Optimizer]) -> Summary:
    """The leaves of the state by group, field and parameter, without its transformation."""
    assert not plan.converted

    def leaves(*actions: str) -> tuple[str, ...]:
        return tuple(
            "/".join([*row.leaf.group, *row.leaf.field, *(row.leaf.parameter or ())])
            for row in plan.rows
            if row.action in actions and row.leaf.transformation
        )

    return Summary(leaves("kept", "renamed"), leaves("initialised"), leaves("dropped"))


DROP = frozenset({"drop"})


def trained(definition: OptimizerDef, steps: int = 2) -> Optimizer:
    return advanced(definition.create(make_params()), steps)


def test_reset_reinitialises_one_group() -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    found, plan = reset(optimizer, "biases")
    assert summary(plan) == Summary(
        kept=("kernels/a/kernel", "kernels/b/kernel"),
        initialised=("biases/grad_ema/a/bias", "biases/grad_sq_ema/a/bias"),
        dropped=("biases/grad_ema/a/bias", "biases/grad_sq_ema/a/bias"),
    )
    states, old = found.state.param_states, optimizer.state.param_states
    assert not states["biases"]["a"]["bias"].grad_ema.any()
    assert states["kernels"]["a"]["kernel"] is old["kernels"]["a"]["kernel"]
    assert found.target["a"]["bias"] is optimizer.target["a"]["bias"]
    assert int(found.state.step) == 2
    assert structure(found) == structure(optimizer)


def test_reset_and_freeze_inside_of_a_group() -> None:
    inner = groups(KERNELS, BIASES)
    optimizer = trained(groups(("a", "a/.*", inner), ("b", "b/kernel", Whole())))
    found, plan = reset(optimizer, "a/kernels")
    assert summary(plan).initialised == ("a/kernels/a/kernel",)
    found, plan = reset(optimizer, "b")
    assert summary(plan).initialised == ("b/count", "b/mu/b/kernel")
    assert int(found.state.param_states["b"][0].count) == 0
    found, plan = freeze(optimizer, "a/bias")
    assert summary(plan).dropped == ("a/biases/grad_ema/a/bias", "a/biases/grad_sq_ema/a/bias")
    assert plan.initialised == ()
    assert advanced(found, 1).target["a"]["bias"] is optimizer.target["a"]["bias"]


def test_reset_of_what_is_not_a_group() -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    with pytest.raises(GroupError, match=r"`other` is not a group; .* are `kernels`, `biases`"):
        reset(optimizer, "other")
    with pytest.raises(GroupError, match="`rest` is frozen and has no state to reset"):
        reset(optimizer, "rest")


def test_freeze_drops_state_and_stops() -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    found, plan = freeze(optimizer, "a/.*")
    assert summary(plan) == Summary(
        kept=("kernels/b/kernel",),
        initialised=(),
        dropped=(
            "kernels/a/kernel",
            "biases/grad_ema/a/bias",
            "biases/grad_sq_ema/a/bias",
        ),
    )
    assert len(plan.dropped) == str(plan).count("\n - ") == 3
    assert table(found) == ["frozen", "kernels", "rest"]
    stepped = advanced(found, 1)
    assert stepped.target["a"]["kernel"] is optimizer.target["a"]["kernel"]
    assert not jnp.array_equal(stepped.target["b"]["kernel"], optimizer.target["b"]["kernel"])
    again, _ = freeze(found, "b/.*")
    assert table(again) == ["frozen_2", "frozen", "rest"]
    assert jax.tree.leaves(again.state.param_states) == []


def test_freeze_of_an_optimizer_without_groups() -> None:
    optimizer = trained(Momentum())
    found, plan = freeze(optimizer, "a/.*", name="layer")
    assert summary(plan).kept == ("rest/b/kernel", "rest/b/scale")
    assert summary(plan).dropped == ("a/bias", "a/kernel")
    assert table(found) == ["layer", "rest"]
    found, plan = freeze(trained(Whole()), "a/.*")
    assert isinstance(found.state.param_states, GroupStates)
    assert summary(plan).kept == ("rest/count", "rest/mu/b/kernel", "rest/mu/b/scale")
    assert int(found.state.param_states["rest"][0].count) == 2


def test_unfreeze_initialises_and_continues() -> None:
    optimizer = trained(groups(KERNELS))
    found, plan = unfreeze(optimizer, ".*bias", Adam(0.1))
    assert summary(plan) == Summary(
        kept=("kernels/a/kernel", "kernels/b/kernel"),
        initialised=("unfrozen/grad_ema/a/bias", "unfrozen/grad_sq_ema/a/bias"),
        dropped=(),
    )
    moved = advanced(found, 1)
    assert not jnp.array_equal(moved.target["a"]["bias"], found.target["a"]["bias"])
    back, plan = freeze(found, ".*bias")
    assert_same(dict(back.state.param_states), dict(optimizer.state.param_states))
    with pytest.raises(GroupError) as caught:
        unfreeze(trained(groups(KERNELS)), "a/.*", Momentum())
    assert str(caught.value) == (
        "`pattern` matches leaves that are not frozen:\n"
        "  `a/kernel` belongs to `kernels` ('.*kernel')\n"
        "Make it narrower, or take `regroup` to move them."
    )


@pytest.mark.parametrize("change", [freeze, lambda o, p: unfreeze(o, p, Momentum())])
def test_a_pattern_that_matches_nothing(change: Any) -> None:
    with pytest.raises(GroupError, match=r"'bias'\) matches no parameter"):
        change(trained(groups(KERNELS)), "bias")
    with pytest.raises(
        GroupError, match=r"not groups\. For that group give its pattern, '\.\*kernel'"
    ):
        change(trained(groups(KERNELS)), "kernels")


def test_from_one_definition_to_groups_and_back_is_exact() -> None:
    optimizer = trained(Whole())
    divided, plan = regroup(optimizer, groups(("a", "a/.*", Whole()), rest=Whole()))
    assert plan.initialised == plan.dropped == ()
    assert summary(plan).kept[:2] == ("a/count", "a/mu/a/bias")
    again, plan = regroup(advanced(divided, 1), Whole())
    assert plan.initialised == plan.dropped == ()
    (count,) = (row for row in plan.rows if row.leaf.role == "count")
    assert [name.split("/")[2] for name in count.sources] == ["a", "rest"]
    assert_same(again, advanced(optimizer, 1))
    leaves = jax.tree.leaves(divided)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    jax.jit(lambda o: o.apply_gradient(o.target), donate_argnums=0)(divided)


def test_groups_that_disagree_are_reinitialised() -> None:
    both = groups(("a", "a/.*", Whole()), rest=Whole())
    optimizer = advanced(reset(trained(both), "a")[0], 1)  # counts 1 and 3
    with pytest.raises(SurgeryError, match="its groups do not agree about `count`"):
        regroup(optimizer, Whole())
    found, plan = regroup(optimizer, Whole(), allow={"drop", "initialise"})
    assert summary(plan).kept == ()
    assert int(found.state.param_states[0].count) == 0
    assert not found.state.param_states[0].mu["b"]["kernel"].any()


CHANGES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "reset": lambda o: reset(o, "biases"),
    "freeze": lambda o: freeze(o, "a/.*"),
    "unfreeze": lambda o: unfreeze(o, "b/scale", Momentum()),
    "regroup": lambda o: regroup(o, groups(KERNELS, BIASES, rest=Adam(0.1))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_works_on_shapes(change: Any) -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    found, plan = change(optimizer)
    abstract, plan_of_shapes = change(jax.eval_shape(lambda: optimizer))
    assert summary(plan_of_shapes) == summary(plan)
    assert structure(abstract) == structure(found)
    pairs = zip(jax.tree.leaves(abstract), jax.tree.leaves(found), strict=True)
    assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


def test_leaves_without_a_count_do_not_join_one_in_silence() -> None:
    """Moments of zero at a large count: Adam's steps would be several times too long."""
    optimizer = trained(groups(("a", "a/.*", Whole()), rest=Momentum()), 5)
    with pytest.raises(SurgeryError, match="as `init` makes it, while `count` continues from 5"):
        regroup(optimizer, Whole(), allow=DROP)
    found, plan = regroup(optimizer, Whole(), allow={"drop", "initialise"})
    assert summary(plan).kept == ("count", "mu/a/bias", "mu/a/kernel")
    assert int(found.state.param_states[0].count) == 5


DEFINITIONS = [Momentum(), Adam(0.1), GradientDescent(0.1), Whole(), FROZEN]


@given(examples=6, data=st.data())
def test_any_regrouping_can_be_trained_and_keeps_no_wrong_state(data: st.DataObject) -> None:
    """Accumulated gradients of ones tell whose state a leaf was."""

    def draw_table() -> MultiOptimizer:
        choice = st.sampled_from(DEFINITIONS)
        chosen = [data.draw(choice) for _ in range(3)]
        return groups(("a", "a/.*", chosen[0]), ("b", "b/kernel", chosen[1]), rest=chosen[2])

    optimizer = draw_table().create(make_params())
    grads = {
        "a": {"kernel": jnp.full((2, 3), 2.0), "bias": jnp.full(3, 3.0)},
        "b": {"kernel": jnp.full((3, 2), 4.0), "scale": jnp.full(2, 5.0)},
    }
    found, plan = regroup(
        optimizer.apply_gradient(grads), draw_table(), allow={"drop", "initialise"}
    )
    fresh = found.optimizer_def.create(make_params())
    assert structure(found) == structure(fresh)
    leaves = summary(plan)
    assert len(leaves.kept) + len(leaves.initialised) == len(
        jax.tree.leaves(found.state.param_states)
    )
    found.apply_gradient(grads)
    for path, state in momenta(found).items():
        expected = value_at(grads, path) if path in momenta(optimizer) else 0.0
        assert jnp.array_equal(state, jnp.full_like(state, expected)), path


def momenta(optimizer: Optimizer) -> dict[tuple[str, ...], Any]:
    """The momentum of every parameter that has one."""
    found = {}
    for part in optimizer.optimizer_def.split(optimizer).values():  # type: ignore[attr-defined]
        if isinstance(part.optimizer_def, Momentum):
            for names, state in flatten_with_paths(part.state.param_states):
                found[names] = state
    return found


def value_at(grads: Any, path: tuple[str, ...]) -> float:
    for name in path:
        grads = grads[name]
    return float(grads.ravel()[0])
