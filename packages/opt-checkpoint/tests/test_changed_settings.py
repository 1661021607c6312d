"""Settings that change between two runs: a restore and surgery in memory give one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from opt_checkpoint import Checkpointer, NamedState, Plan, Schema, named_state, plan_restore
from opt_core import Optimizer, regroup
from opt_core.errors import SurgeryError
from opt_optax_bridge import OptaxWrapper

contrib: Any = optax.contrib
pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([0.5])}
GRADS = {"a": jnp.array([0.25, -0.5]), "b": jnp.array([1.0])}


def wrapped(tx: Any) -> Optimizer:
    return OptaxWrapper(tx).create(PARAMS)


def stepped(optimizer: Optimizer, steps: int) -> Optimizer:
    for _ in range(steps):
        optimizer = optimizer.apply_gradient(GRADS)
    return optimizer


def steps(k: int) -> Any:
    return optax.MultiSteps(optax.sgd(0.1, momentum=0.9), k).gradient_transformation()


def leaves(optimizer: Optimizer) -> dict[str, Any]:
    return {name: np.asarray(leaf) for name, leaf in named_state(optimizer).items()}


def by_restore(old: Optimizer, new: Any, allow: Any = ()) -> Optimizer:
    restored: Optimizer = plan_restore(named_state(old), wrapped(new), allow=allow).apply()
    return restored


def by_surgery(old: Optimizer, new: Any, allow: Any = ()) -> Optimizer:
    return regroup(old, OptaxWrapper(new), allow=allow)[0]


DOORS: list[Callable[..., Optimizer]] = [by_restore, by_surgery]
doors = pytest.mark.parametrize("door", DOORS, ids=["restore", "surgery"])

WINDOWS: dict[str, tuple[Any, Any, int]] = {
    "multi_steps shorter": (steps(4), steps(2), 4),
    "multi_steps longer": (steps(2), steps(3), 2),
    "apply_every shorter": (optax.apply_every(4), optax.apply_every(2), 4),
    "apply_every longer": (optax.apply_every(2), optax.apply_every(3), 2),
    "sam": (
        contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=4),
        contrib.sam(optax.sgd(0.1), optax.sgd(0.1), sync_period=2),
        4,
    ),
}


@pytest.mark.sample(4)
@doors
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_takes_its_new_length_when_the_last_one_is_complete(name: str, door: Any) -> None:
    before, after, length = WINDOWS[name]
    old = stepped(wrapped(before), 2 * length)
    # The new definition on the old state: outside of a window nothing of it depends on the length.
    expected = stepped(old.replace(optimizer_def=OptaxWrapper(after)), 6)
    found = stepped(door(old, after), 6)
    assert not np.array_equal(found.target["a"], old.target["a"])
    for leaf, value in leaves(expected).items():
        np.testing.assert_array_equal(leaves(found)[leaf], value, err_msg=leaf)


@pytest.mark.sample(4)
@doors
@pytest.mark.parametrize("name", WINDOWS)
def test_an_open_window_keeps_its_length(name: str, door: Any) -> None:
    before, after, length = WINDOWS[name]
    old = stepped(wrapped(before), 2 * length + 1)
    with pytest.raises((ValueError, SurgeryError), match="a window is open"):
        door(old, after)


def injected(rate: Any, **options: Any) -> Any:
    return optax.inject_hyperparams(optax.adamw)(learning_rate=rate, **options)


RATE = "state/inject_hyperparams/hyperparams/learning_rate"


def with_rate(optimizer: Optimizer, rate: float) -> Optimizer:
    """As a program does that sets the rate while it trains."""
    inject = optimizer.state.param_states
    changed = {**inject.hyperparams, "learning_rate": jnp.float32(rate)}
    state = inject._replace(hyperparams=changed)
    return optimizer.replace(state=optimizer.state.replace(param_states=state))


@doors
def test_a_rate_set_at_run_time_continues_under_the_same_code(door: Any) -> None:
    old = with_rate(stepped(wrapped(injected(0.5)), 3), 0.125)
    assert leaves(door(old, injected(0.5)))[RATE] == 0.125
    assert plan_restore(named_state(old), wrapped(injected(0.5))).is_exact


@doors
def test_a_rate_changed_in_the_code_acts(door: Any) -> None:
    old = with_rate(stepped(wrapped(injected(0.5)), 3), 0.125)
    found = door(old, injected(0.25))
    expected = leaves(with_rate(old, 0.25))
    for name, leaf in leaves(found).items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def test_a_rate_changed_in_the_code_is_reported(tmp_path: Any) -> None:
    old = stepped(wrapped(injected(0.5)), 3)
    told = "`learning_rate` was 0.5, is 0.25 in the code, which acts"
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, old)
        checkpointer.wait()
        plan = plan_restore(checkpointer.at(3), wrapped(injected(0.25)))
        assert checkpointer.restore_latest(wrapped(injected(0.25))).state.step == 3
    assert plan.is_ok
    assert not plan.is_exact
    assert f"+ {RATE} float32[]: {told}" in str(plan)
    _, report = regroup(old, OptaxWrapper(injected(0.25)))
    assert told in str(report)


def test_without_a_word_about_the_code_the_saved_rate_continues_and_is_reported() -> None:
    old = with_rate(wrapped(injected(0.5)), 0.125)
    named = named_state(old)
    untold = NamedState(named.leaves, Schema(named.schema.leaves))
    target = jax.eval_shape(lambda: wrapped(injected(0.25)))
    plan: Plan[Any] = plan_restore(untold, target)
    assert f"= {RATE} float32[]: saved; nothing says what the code gave" in str(plan)
    assert not plan.is_exact
    assert leaves(plan.apply())[RATE] == 0.125
    assert leaves(plan_restore(named, target).apply())[RATE] == 0.25


@doors
def test_a_schedule_in_place_of_a_rate_acts(door: Any) -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    old = stepped(wrapped(injected(0.5)), 3)
    found = stepped(door(old, injected(schedule), allow={"initialise"}), 1)
    assert leaves(found)[RATE] == schedule(3)


def factor(scale: float) -> Any:
    @optax.inject_hyperparams
    def scaled(scale: float) -> Any:
        return optax.chain(optax.scale(scale), optax.scale_by_adam())

    return scaled(scale)


@doors
def test_an_injected_factor_before_moments_is_refused_as_one_that_is_not(door: Any) -> None:
    old = stepped(wrapped(factor(2.0)), 2)
    assert leaves(door(old, factor(2.0))).keys() == leaves(old).keys()
    with pytest.raises((ValueError, SurgeryError), match="`step_size` of `scale` was"):
        door(old, factor(4.0))


def test_a_setting_that_acts_in_init_alone_is_reported() -> None:
    old = named_state(stepped(wrapped(optax.rprop(0.1)), 2))
    plan = plan_restore(old, wrapped(optax.rprop(0.2)))
    assert plan.is_ok
    assert not plan.is_exact
    assert "`learning_rate` was 0.1, is 0.2: no effect on the saved state" in str(plan)
    assert plan_restore(old, wrapped(optax.rprop(0.1))).is_exact
