"""`guard`: which steps are made, and what is left of those that are not."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import (
    MultiSteps,
    Reason,
    Spike,
    check_skips,
    guard,
    report,
    with_average,
)
from opt_accumulate.errors import OptionError, StuckError

PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.ones(2)}
START: Any = PARAMS
INNER = optax.sgd(0.05, momentum=0.9)
QUICK = Spike(window=16, warmup=4, patience=3)
NAN, INF = float("nan"), float("inf")
NORM = float(optax.tree.norm(PARAMS))


def grads_of(norm: float) -> Any:
    return jax.tree.map(lambda p: p * (norm / NORM), PARAMS)


@functools.cache
def compiled(tx: Any) -> Any:
    return jax.jit(lambda p, s, g, loss: tx.apply(p, s, g, loss=loss))


@functools.cache
def guarded(**options: Any) -> Any:
    """The same one for the same options, so that it is compiled once."""
    return guard(INNER, **options)


DEFAULT = guarded()


def steps_of(tx: Any, losses: list[float], norms: list[float] | None = None) -> list[Any]:
    """Parameters and state before the first step and after each."""
    carried = [(PARAMS, tx.init(PARAMS))]
    apply = compiled(tx)
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        carried.append(apply(*carried[-1], grads_of(norm), jnp.float32(loss)))
    return carried


def skips(tx: Any, losses: list[float], norms: list[float] | None = None) -> list[bool]:
    return [bool(report(state).was_skipped) for _, state in steps_of(tx, losses, norms)[1:]]


def assert_bit_equal(one: Any, other: Any) -> None:
    chex.assert_trees_all_equal_structs(one, other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# What is skipped


@pytest.mark.sample(2)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped_once(bad: float, where: str) -> None:
    losses, norms = [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]
    (losses if where == "loss" else norms)[1] = bad
    carried = steps_of(DEFAULT, losses, norms)
    assert [bool(s.was_skipped) for _, s in carried[1:]] == [False, True, False, False]
    chex.assert_tree_all_finite(carried[-1])
    found = report(carried[-1][1])
    assert (int(found.skipped), int(found.last_skipped), int(found.consecutive)) == (1, 1, 0)
    assert Reason(int(found.reason)) == Reason.NONFINITE
    assert not found.was_skipped


def test_a_skipped_step_is_bit_equal() -> None:
    tx = guard(with_average(INNER, 0.9), loss=QUICK)
    carried = steps_of(tx, [1.0, 1.1, 0.9, 1.0, 50.0, 1.0])
    (params, before), (after, skipped) = carried[4:6]
    assert bool(skipped.was_skipped)
    assert Reason(int(skipped.reason)) == Reason.LOSS
    assert_bit_equal((after, skipped.inner), (params, before.inner))
    assert_bit_equal(
        (skipped.loss.values, skipped.loss.count, skipped.grad_norm),
        (before.loss.values, before.loss.count, before.grad_norm),
    )
    clean = steps_of(tx, [1.0, 1.1, 0.9, 1.0, 1.0])[-1]
    assert_bit_equal((carried[-1][0], carried[-1][1].inner), (clean[0], clean[1].inner))


def test_a_loss_that_comes_under_another_name() -> None:
    """NumPyro and Optax's `reduce_on_plateau` call it `value`; the optimizer still gets it."""
    contrib: Any = optax.contrib
    inner = optax.chain(INNER, contrib.reduce_on_plateau())
    tx = guard(inner, loss=dataclasses.replace(QUICK, argument="value"))
    params, state = START, tx.init(PARAMS)
    update = jax.jit(lambda s, p, value: tx.update(grads_of(1.0), s, p, value=value))
    seen = []
    for value in [1.0] * 5 + [50.0, NAN, 1.0]:
        _, state = update(state, params, jnp.float32(value))
        seen.append(bool(state.was_skipped))
    assert seen == [False] * 5 + [True, True, False]
    assert float(state.inner[1].best_value) == 1.0


def test_states_are_walked_as_tuples() -> None:
    """Trainers look for a part of a state in this way."""
    for tx in (guard(INNER, loss=None), with_average(INNER, 0.9)):
        state: Any = tx.init(PARAMS)
        assert list(state) == [getattr(state, name) for name in state._fields]


def test_the_threshold_is_mean_and_deviation_of_the_last_accepted() -> None:
    rng = np.random.default_rng(0)
    losses = [float(x) for x in rng.normal(3.0, 0.1, 40).astype(np.float32)]
    losses[20], losses[30] = 9.0, NAN
    spike = dataclasses.replace(QUICK, sigma=4.0, min_deviation=0.0)
    carried = steps_of(guarded(loss=spike, grad_norm=None), losses)
    accepted: list[float] = []
    for loss, (_, before), (_, after) in zip(losses, carried, carried[1:], strict=False):
        last = np.array(accepted[-spike.window :], np.float64)
        limit = last.mean() + 4 * last.std(ddof=1) if len(last) >= spike.warmup else INF
        if np.isfinite(limit):
            np.testing.assert_allclose(before.loss.threshold(spike), limit, rtol=1e-5)
        assert bool(after.was_skipped) == (not loss <= limit)
        if loss <= limit:
            accepted.append(loss)
    assert len(accepted) == 38


def test_a_level_that_has_come_to_stay_is_accepted() -> None:
    tx = guarded(grad_norm=None)
    losses = [1.0] * 40 + [5.0] * 60
    found = skips(tx, losses)
    assert found == [False] * 40 + [True] * 16 + [False] * 44
    _, state = steps_of(tx, losses)[-1]
    assert int(state.loss.count) == 44
    assert float(state.loss.threshold(Spike())) == pytest.approx(5.0 * 1.06)


def test_spikes_apart_are_no_new_level() -> None:
    tx = guarded(loss=QUICK, grad_norm=None)  # patience of 3
    losses = [1.0] * 6 + [9.0, 9.0, 1.0, 9.0, NAN, 9.0, 1.0, 9.0]
    assert skips(tx, losses)[6:] == [True, True, False, True, True, True, False, True]
    # A NaN between two spikes neither counts nor ends the row.
    assert skips(tx, [1.0] * 6 + [9.0, 9.0, NAN, 9.0, 9.0])[6:] == [True] * 4 + [False]


@pytest.mark.slow
def test_all_reasons_are_told() -> None:
    tx = guarded(loss=QUICK, grad_norm=QUICK)
    _, state = steps_of(tx, [1.0] * 5 + [9.0], [1.0] * 5 + [20.0])[-1]
    assert Reason(int(report(state).reason)) == Reason.LOSS | Reason.GRAD_NORM


# Norms of updates


class Jumping:
    """Whose update is the gradient times what the extra argument says."""

    def init(self, params: Any) -> Any:
        return jnp.zeros([], jnp.int32)

    def update(self, grads: Any, state: Any, params: Any = None, *, jump: Any) -> Any:
        return jax.tree.map(lambda g: -g * jump, grads), state + 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["apply", "update"])
def test_spikes_of_the_update_norm(form: str) -> None:
    jumping: Any = Jumping()
    inner = optax.GradientTransformationExtraArgs(jumping.init, jumping.update)
    tx = guard(inner, loss=None, grad_norm=None, update_norm=QUICK)
    params, state = START, tx.init(PARAMS)
    apply, update = jax.jit(tx.apply), jax.jit(tx.update)
    seen = []
    for jump in [1e-2] * 5 + [1.0, NAN, 1e-2]:
        before = params, state.inner
        if form == "apply":
            params, state = apply(params, state, grads_of(1.0), jump=jump)
        else:
            updates, state = update(grads_of(1.0), state, params, jump=jump)
            params = optax.apply_updates(params, updates)
        if state.was_skipped:
            assert_bit_equal((params, state.inner), before)
        seen.append(Reason(int(state.reason)) if state.was_skipped else None)
    assert seen == [None] * 5 + [Reason.UPDATE_NORM, Reason.NONFINITE, None]
    assert (int(state.inner), int(state.update_norm.count)) == (6, 6)
    np.testing.assert_allclose(state.update_norm.values[:6], 1e-2, rtol=1e-5)


# When nothing helps


def test_max_consecutive() -> None:
    tx = guarded(max_consecutive=3)
    carried = steps_of(tx, [1.0, NAN, NAN, 1.0, NAN, NAN, NAN, NAN, 1.0])
    assert [bool(report(s).stuck) for _, s in carried] == [False] * 7 + [True, True, False]
    check_skips(carried[6][1])
    with pytest.raises(StuckError, match="3 steps in a row were skipped"):
        check_skips(carried[7][1])
    with pytest.raises(StuckError, match="4 steps in a row"):
        check_skips((carried[8][1],), 3)
    check_skips(carried[8][1], 4)
    with pytest.raises(jax.errors.JAXTypeError):  # it reads numbers
        jax.jit(lambda s: check_skips(s))(carried[0][1])


@pytest.mark.slow
def test_nonfinite_apply_makes_the_step_and_remembers_nothing_of_it() -> None:
    tx = guarded(nonfinite="apply", loss=QUICK)
    carried = steps_of(tx, [1.0, NAN, 1.0])
    assert not any(bool(s.was_skipped) for _, s in carried)
    assert int(carried[-1][1].loss.count) == 2


# With others


def test_in_a_window_it_judges_what_is_emitted() -> None:
    tx = MultiSteps(guarded(loss=QUICK), 2)
    params, state = START, tx.init(PARAMS)
    apply = jax.jit(lambda p, s, g, loss: tx.apply(p, s, g, loss=loss))
    for loss in [1.0] * 8 + [1.0, 30.0] + [1.0] * 2:
        params, state = apply(params, state, grads_of(1.0), loss)
    found = report(state)
    assert (int(found.skipped), int(found.last_skipped)) == (1, 4)


@pytest.mark.slow
def test_two_guards_have_two_reports() -> None:
    tx = guard(guard(INNER))
    _, state = steps_of(tx, [1.0])[-1]
    with pytest.raises(OptionError, match=r"must hold one guard, found 2: `\.`, `inner`"):
        report(state)
    assert int(report(state.inner).skipped) == 0
    with pytest.raises(OptionError, match="must hold one guard, found 0"):
        report(INNER.init(PARAMS))


LARGE = float(np.finfo(np.float32).max)


@pytest.mark.sample(3)
@pytest.mark.parametrize("spike", [None, QUICK])
@pytest.mark.parametrize(
    ("values", "is_finite"),
    [
        ([2e19, 1.0], True),
        (3e30, True),  # alone it was squared apart from the factor that makes it small
        ([LARGE] * 1000, True),
        ([INF, -INF], False),
        ([LARGE, NAN], False),
        (np.array([1, INF], jnp.float8_e5m2), False),  # which JAX promotes to nothing
    ],
)
def test_finite_gradients_are_finite_whatever_their_squares(
    spike: Spike | None, values: Any, is_finite: bool
) -> None:
    grads = jnp.array(values)
    params = jnp.ones_like(grads)
    tx = guard(optax.set_to_zero(), loss=None, grad_norm=spike)
    with jax.debug_nans(is_finite):
        _, state = jax.jit(tx.apply)(params, tx.init(params), grads)
    assert bool(state.was_skipped) is not is_finite
    if is_finite and spike is not None:
        # Of squares that overflow it is the largest number.
        assert float(state.grad_norm.values[0]) == LARGE
