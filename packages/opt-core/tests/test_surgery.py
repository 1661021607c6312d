"""Changing the groups of an optimizer, and what becomes of its state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from core_testing import Momentum, advanced, assert_same, given, structure
from flax_optim import Adam, GradientDescent
from hypothesis import strategies as st
from opt_core import (
    FROZEN,
    ChangeReport,
    GroupStates,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    flatten_with_paths,
    freeze,
    increment_step,
    regroup,
    reset,
    unfreeze,
)
from opt_core.errors import GroupError, SurgeryError


class Moments(NamedTuple):
    count: Any
    mu: Any


class Beliefs(NamedTuple):
    count: Any
    mu: Any


class Whole(OptimizerDef):
    """One state for all its leaves, with a count, as an Optax transformation."""

    def __init__(self, make: Any = Moments) -> None:
        super().__init__(None)
        self.make = make

    def init_state(self, params: Any) -> OptimizerState:
        state = self.make(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))
        return OptimizerState(jnp.zeros((), jnp.int32), (state, ()))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        (old, rest) = state.param_states
        mu = jax.tree.map(jnp.add, old.mu, grads)
        return params, OptimizerState(
            increment_step(state.step), (self.make(old.count + 1, mu), rest)
        )


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


def summary(report: ChangeReport) -> Summary:
    assert report.renamed == report.converted == ()
    return Summary(report.kept, report.initialised, report.dropped)


DROP = frozenset({"drop"})


def trained(definition: OptimizerDef, steps: int = 2) -> Optimizer:
    return advanced(definition.create(make_params()), steps)


def test_reset_reinitialises_one_group() -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    found, report = reset(optimizer, "biases")
    assert summary(report) == Summary(
        kept=("kernels/a/kernel", "kernels/b/kernel"),
        initialised=("biases/a/bias/grad_ema", "biases/a/bias/grad_sq_ema"),
        dropped=("biases/a/bias/grad_ema", "biases/a/bias/grad_sq_ema"),
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
    found, report = reset(optimizer, "a/kernels")
    assert report.initialised == ("a/kernels/a/kernel",)
    found, report = reset(optimizer, "b")
    assert report.initialised == ("b/0/count", "b/0/mu/b/kernel")
    assert int(found.state.param_states["b"][0].count) == 0
    found, report = freeze(optimizer, "a/bias")
    assert report.dropped == ("a/biases/a/bias/grad_ema", "a/biases/a/bias/grad_sq_ema")
    assert report.initialised == ()
    assert advanced(found, 1).target["a"]["bias"] is optimizer.target["a"]["bias"]


def test_reset_of_what_is_not_a_group() -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    with pytest.raises(GroupError, match=r"`other` is not a group; .* are `kernels`, `biases`"):
        reset(optimizer, "other")
    with pytest.raises(GroupError, match="`rest` is frozen and has no state to reset"):
        reset(optimizer, "rest")


def test_freeze_drops_state_and_stops() -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    found, report = freeze(optimizer, "a/.*")
    assert summary(report) == Summary(
        kept=("kernels/b/kernel",),
        initialised=(),
        dropped=(
            "kernels/a/kernel",
            "biases/a/bias/grad_ema",
            "biases/a/bias/grad_sq_ema",
        ),
    )
    assert str(report) == (
        "kept 1\n  kernels/b/kernel\n"
        "dropped 3\n  kernels/a/kernel\n  biases/a/bias/grad_ema\n  biases/a/bias/grad_sq_ema"
    )
    assert table(found) == ["frozen", "kernels", "rest"]
    stepped = advanced(found, 1)
    assert stepped.target["a"]["kernel"] is optimizer.target["a"]["kernel"]
    assert not jnp.array_equal(stepped.target["b"]["kernel"], optimizer.target["b"]["kernel"])
    again, _ = freeze(found, "b/.*")
    assert table(again) == ["frozen_2", "frozen", "rest"]
    assert jax.tree.leaves(again.state.param_states) == []


def test_freeze_of_an_optimizer_without_groups() -> None:
    optimizer = trained(Momentum())
    found, report = freeze(optimizer, "a/.*", name="layer")
    assert report.kept == ("rest/b/kernel", "rest/b/scale")
    assert report.dropped == ("a/bias", "a/kernel")
    assert table(found) == ["layer", "rest"]
    found, report = freeze(trained(Whole()), "a/.*")
    assert isinstance(found.state.param_states, GroupStates)
    assert report.kept == ("rest/0/count", "rest/0/mu/b/kernel", "rest/0/mu/b/scale")
    assert int(found.state.param_states["rest"][0].count) == 2


def test_unfreeze_initialises_and_continues() -> None:
    optimizer = trained(groups(KERNELS))
    found, report = unfreeze(optimizer, ".*bias", Adam(0.1))
    assert summary(report) == Summary(
        kept=("kernels/a/kernel", "kernels/b/kernel"),
        initialised=("unfrozen/a/bias/grad_ema", "unfrozen/a/bias/grad_sq_ema"),
        dropped=(),
    )
    moved = advanced(found, 1)
    assert not jnp.array_equal(moved.target["a"]["bias"], found.target["a"]["bias"])
    back, report = freeze(found, ".*bias")
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


def test_regroup_keeps_what_fits() -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    new = groups(
        ("first", "a/.*", Momentum(0.1)), ("second", "b/kernel", Adam(0.1)), rest=Momentum()
    )
    found, report = regroup(optimizer, new, allow=DROP)
    assert summary(report) == Summary(
        kept=("first/a/kernel",),
        initialised=(
            "first/a/bias",
            "second/b/kernel/grad_ema",
            "second/b/kernel/grad_sq_ema",
            "rest/b/scale",
        ),
        dropped=(
            "kernels/b/kernel",
            "biases/a/bias/grad_ema",
            "biases/a/bias/grad_sq_ema",
        ),
    )
    assert found.optimizer_def == new
    assert int(found.state.step) == 2
    assert_same(found.target, optimizer.target)


def test_from_one_definition_to_groups_and_back_is_exact() -> None:
    optimizer = trained(Whole())
    divided, report = regroup(optimizer, groups(("a", "a/.*", Whole()), rest=Whole()))
    assert report.initialised == report.dropped == ()
    assert report.kept[:2] == ("a/0/count", "a/0/mu/a/bias")
    again, report = regroup(advanced(divided, 1), Whole())
    assert report.initialised == report.dropped == ()
    assert report.changes[0].sources == ("a/0/count", "rest/0/count")
    assert_same(again, advanced(optimizer, 1))
    leaves = jax.tree.leaves(divided)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    jax.jit(lambda o: o.apply_gradient(o.target), donate_argnums=0)(divided)


def test_other_meanings_of_the_same_paths_do_not_fit() -> None:
    with pytest.raises(SurgeryError, match=r"moment of `a/bias` in `\S+\.moments`"):
        regroup(trained(Whole(Moments)), Whole(Beliefs))
    _, report = regroup(trained(Whole(Moments)), Whole(Beliefs), allow=DROP)
    assert report.kept == ()
    assert len(report.initialised) == len(report.dropped) == 5


def test_groups_that_disagree_are_reinitialised() -> None:
    both = groups(("a", "a/.*", Whole()), rest=Whole())
    optimizer = advanced(reset(trained(both), "a")[0], 1)  # counts 1 and 3
    with pytest.raises(SurgeryError, match="its groups do not agree about `count`"):
        regroup(optimizer, Whole())
    found, report = regroup(optimizer, Whole(), allow=DROP)
    assert report.kept == ()
    assert int(found.state.param_states[0].count) == 0
    assert not found.state.param_states[0].mu["b"]["kernel"].any()


CHANGES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "reset": lambda o: reset(o, "biases"),
    "freeze": lambda o: freeze(o, "a/.*"),
    "unfreeze": lambda o: unfreeze(o, "b/scale", Momentum()),
    "regroup": lambda o: regroup(o, groups(KERNELS, BIASES, rest=Adam(0.1))),
}


def test_what_reads_counts_is_for_outside_of_compiled_functions() -> None:
    both = trained(groups(("a", "a/.*", Whole()), rest=Whole()))
    with pytest.raises(GroupError, match="outside of compiled functions"):
        jax.jit(lambda o: regroup(o, Whole())[0])(both)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_works_on_tracers_and_on_shapes(change: Any) -> None:
    optimizer = trained(groups(KERNELS, BIASES))
    found, report = change(optimizer)
    assert_same(jax.jit(lambda o: change(o)[0])(optimizer), found)
    shapes, report_of_shapes = change(jax.eval_shape(lambda: optimizer))
    assert summary(report_of_shapes) == summary(report)
    for abstract in (shapes, jax.eval_shape(lambda o: change(o)[0], optimizer)):
        assert structure(abstract) == structure(found)
        pairs = zip(jax.tree.leaves(abstract), jax.tree.leaves(found), strict=True)
        assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


@pytest.mark.parametrize("other", [Momentum(), FROZEN])
def test_leaves_without_a_count_do_not_join_one(other: Any) -> None:
    """Moments of zero at a large count: Adam's steps would be several times too long."""
    optimizer = trained(groups(("a", "a/.*", Whole()), rest=other), 5)
    with pytest.raises(SurgeryError, match="join it: its `count` is not theirs"):
        regroup(optimizer, Whole())
    found, report = regroup(optimizer, Whole(), allow=DROP)
    assert report.kept == ()
    assert int(found.state.param_states[0].count) == 0
    found, report = regroup(optimizer, Whole(), counts="keep", allow=DROP)
    assert report.kept == ("0/count", "0/mu/a/bias", "0/mu/a/kernel")
    assert int(found.state.param_states[0].count) == 5
    with pytest.raises(GroupError, match="`counts` must be 'agree' or 'keep', found 'all'"):
        regroup(optimizer, Whole(), counts="all")  # type: ignore[arg-type]


def test_unfreeze_what_is_frozen_inside() -> None:
    inner = groups(("kernels", ".*kernel", Whole()))
    optimizer = trained(groups(("a", "a/.*", inner), ("b", "b/kernel", Whole())))
    found, report = unfreeze(optimizer, "a/bias", Whole())
    assert report.initialised == ("unfrozen/0/count", "unfrozen/0/mu/a/bias")
    assert report.dropped == ()
    assert jnp.array_equal(advanced(found, 1).state.param_states["unfrozen"][0].count, 1)


DEFINITIONS = [Momentum(), Adam(0.1), GradientDescent(0.1), Whole(), FROZEN]


@given(data=st.data())
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
    found, report = regroup(optimizer.apply_gradient(grads), draw_table(), allow=DROP)
    fresh = found.optimizer_def.create(make_params())
    assert structure(found) == structure(fresh)
    assert len(report.kept) + len(report.initialised) == len(
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
