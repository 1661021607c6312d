"""Acceptance, F: numerics that fail late."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import opt_optax_bridge
import optax
import pytest
from opt_accumulate import MultiSteps, check_skips, guard
from opt_accumulate.errors import StuckError
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

BAD = [jnp.nan, jnp.inf, -jnp.inf]
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}


def grads_of(value: Any, number: int = 0) -> Any:
    """Gradients that are different in each mini-step; one entry is `value`."""
    good = jax.tree.map(lambda leaf: leaf * 0.1 * (number + 1) + 0.3, PARAMS)
    return good | {"b": good["b"] * np.array([1, 1 if np.isfinite(value) else value], np.float32)}


@jax.jit
def apply(optimizer: Optimizer, grads: Any) -> Optimizer:
    return optimizer.apply_gradient(grads)


@functools.cache
def compiled(guarded: bool) -> tuple[Any, Any]:
    """An Adam of windows of three mini-steps, and its compiled step."""
    steps: Any = MultiSteps(optax.adam(1e-2), 3)
    if guarded:
        steps = guard(steps, loss=None, grad_norm=None)
    return OptaxWrapper(steps), apply


def finite(tree: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("at", range(3))
def test_f1_a_bad_gradient_at_any_micro_step_goes_by_the_policy(at: int, bad: float) -> None:
    """NaN or Inf at each micro-step: skipped as if it were not; unguarded, nothing stays."""
    definition, step = compiled(True)
    optimizer = expected = definition.create(PARAMS)
    for number in range(6):
        if number == at:
            optimizer = step(optimizer, grads_of(bad))
            assert finite(optimizer)
        optimizer = step(optimizer, grads_of(1.0, number))
        expected = step(expected, grads_of(1.0, number))
    jax.tree.map(np.testing.assert_array_equal, optimizer.target, expected.target)
    for field in ("inner_opt_state", "acc_grads", "mini_step", "gradient_step"):
        ours, theirs = (getattr(o.state.param_states.inner, field) for o in (optimizer, expected))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert int(optimizer.state.param_states.inner.gradient_step) == 2

    # Without a guard the window is spoilt, as documented, but its accumulator is not.
    definition, step = compiled(False)
    optimizer = definition.create(PARAMS)
    for number in range(3):
        assert finite(optimizer.target)
        optimizer = step(optimizer, grads_of(bad if number == at else 1.0, number))
    state = optimizer.state.param_states
    assert not finite(optimizer.target)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.acc_grads))


def test_f2_bad_steps_in_a_row_stop_the_run_and_change_nothing() -> None:
    """After k bad steps in a row: an error, and parameters and optimizer as they were."""
    definition, step = compiled(True)
    before = optimizer = step(definition.create(PARAMS), grads_of(1.0))
    for number, bad in enumerate([*BAD, jnp.nan], start=1):
        optimizer = step(optimizer, grads_of(bad))
        check_skips(optimizer.state, number)
    with pytest.raises(StuckError, match="4 steps in a row were skipped"):
        check_skips(optimizer.state, 3)

    def kept(optimizer: Optimizer) -> Any:
        return optimizer.target, optimizer.state.param_states.inner

    jax.tree.map(np.testing.assert_array_equal, kept(optimizer), kept(before))
    check_skips(step(optimizer, grads_of(1.0)).state, 0)  # a good one ends the row


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2**31 - 2, 2**31 - 1])
def test_f3_counters_saturate(count: int) -> None:
    """Counters at the end of int32 stay there; learning rate and bias correction stay finite.

    Optax's own `adafactor` adds 1 to such a count and raises it to a power: there it ends in NaN.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 1000, 1e-3)
    growing = MultiSteps(optax.adam(schedule), lambda step: jnp.where(step < 9, 2, 1))
    definitions = [
        opt_optax_bridge.adamw(schedule),
        opt_optax_bridge.lamb(schedule),
        opt_adafactor.Adafactor(schedule),
        OptaxWrapper(growing),
    ]

    def late(leaf: Any) -> Any:
        is_counter = leaf.dtype == jnp.int32 and not leaf.shape
        return jnp.int32(count) if is_counter else leaf

    for definition in definitions:
        optimizer = definition.create(PARAMS)
        state = jax.tree.map(late, optimizer.state)
        if isinstance(state.param_states, optax.MultiStepsState):  # within a window of one
            mini_step = jnp.zeros([], jnp.int32)
            state = state.replace(param_states=state.param_states._replace(mini_step=mini_step))
        before = optimizer = optimizer.replace(state=state)
        for _ in range(2):
            optimizer = apply(optimizer, grads_of(1.0))
        assert finite(optimizer)
        assert not np.array_equal(optimizer.target["w"], before.target["w"])
        for leaf in jax.tree.leaves(optimizer.state):
            if leaf.dtype == jnp.int32:
                assert int(leaf) in (0, 2**31 - 1)
        assert int(optimizer.state.step) == 2**31 - 1


@functools.cache
def summing(k: int) -> OptaxWrapper:
    return OptaxWrapper(MultiSteps(optax.sgd(1.0), k, use_grad_mean=False))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("k", "new_k"), [(4, 2), (4, 3), (2, 4), (3, 1), (1, 3)])
def test_f4_every_micro_batch_counts_once_when_k_changes_on_restore(k: int, new_k: int) -> None:
    """Restored with another k the window goes on: no micro-batch is lost, none counts twice."""
    for held in range(k):
        optimizer = summing(k).create(jnp.zeros(()))
        for number in range(k + held):  # a whole window, and `held` of the next
            optimizer = apply(optimizer, np.float32(2**number))
        new = summing(new_k).create(jnp.ones(())).restore_state(optimizer.state_dict())
        assert int(new.state.param_states.mini_step) == held
        needed = max(new_k - held, 1)  # a window that is full already emits with its next one
        for number in range(k + held, k + held + needed):
            assert int(new.target) == 1 - 2**k
            new = apply(new, np.float32(2**number))
        # Every micro-batch is one bit of the sum.
        assert int(new.target) == 1 - 2 ** (k + held + needed)
        assert int(new.state.param_states.gradient_step) == 2
        assert int(new.state.param_states.mini_step) == 0


def test_f5_second_moments_do_not_stall() -> None:
    """2000 gradients of 1: fp32 moments reach 0.8648; those of bf16 parameters stall, as said."""

    def nu_after(definition: Any, params: Any, grad: Any, steps: int = 2000) -> Any:
        def body(optimizer: Optimizer, _: None) -> tuple[Optimizer, None]:
            return optimizer.apply_gradient(grad), None

        optimizer, _ = jax.jit(lambda optimizer: jax.lax.scan(body, optimizer, length=steps))(
            definition.create(params)
        )
        return optimizer

    adam = opt_optax_bridge.adam(1e-3, b2=0.999)
    bfloat16, float32 = jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.float32)

    def nu(optimizer: Optimizer) -> float:
        return float(optimizer.state.param_states[0].nu[0])

    # Float32 parameters, gradients of a bfloat16 copy: what the README recommends.
    assert nu(nu_after(adam, float32, bfloat16)) == pytest.approx(0.8648, abs=1e-3)
    # Bfloat16 parameters: the state is Optax's, and it stalls.
    assert nu(nu_after(adam, bfloat16, bfloat16)) == 0.5
    # Adafactor keeps its statistics in float32 whatever the parameters are.
    adafactor = opt_adafactor.Adafactor(1e-3, decay_rate=0.8)
    state = nu_after(adafactor, bfloat16, bfloat16).state.param_states
    assert state.v.dtype == jnp.float32
    np.testing.assert_allclose(state.v, 1.0, rtol=1e-5)
