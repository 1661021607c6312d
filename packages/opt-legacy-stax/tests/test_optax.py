"""To Optax and back: runs that switch in the middle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import optax
import optax.contrib
import pytest
from opt_legacy_stax import errors
from stax_testing import same_structure

SWITCH, STEPS = 3, 9
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"mass": 0.9},
    "nesterov": {"mass": 0.8},
    "adagrad": {},
    "rmsprop": {"gamma": 0.8},
    "rmsprop_momentum": {},
    "adam": {},
    "adamax": {"eps": 0.0},
    "sm3": {},
}
EXACT = ("sgd", "momentum", "nesterov")
# Two or three units of float32's last place, relative to the largest entry; the most measured after
# 13 updates was 2.1e-7, with jax 0.8 to 0.12 on x86.
TOLERANCE = 1e-6


def make(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "b": [jnp.asarray(rng.normal(size=3), jnp.float32)],
    }


PARAMS, *GRADS = (make(seed) for seed in range(STEPS + 1))
RATES = {"number": 0.05, "schedule": ours.exponential_decay(0.05, 10, 0.5)}


def run_triple(triple: Any, state: Any, start: int, stop: int, grads: Any = GRADS) -> Any:
    update = jax.jit(triple.update_fn)
    for i in range(start, stop):
        state = update(jnp.int32(i), grads[i], state)
    return state


@functools.cache  # a transformation is a tuple of functions; each is compiled once
def compiled_step(tx: Any) -> Any:
    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run_optax(
    tx: Any, params: Any, state: Any, start: int, stop: int, grads: Any = GRADS
) -> tuple[Any, Any]:
    step = compiled_step(tx)
    for i in range(start, stop):
        params, state = step(params, state, grads[i])
    return params, state


def check(found: Any, expected: Any, *, exact: bool) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b)
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            atol = TOLERANCE * float(np.max(np.abs(b)))
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@pytest.mark.sample(4)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_run_that_switches_to_the_equivalent_and_back(name: str, rate: str) -> None:
    equivalent = ours.optax_equivalent(name, step_size=RATES[rate], **ARGUMENTS[name])
    assert equivalent.is_exact == (name in EXACT)
    triple, tx = equivalent.triple, equivalent.transformation
    half = run_triple(triple, triple.init_fn(PARAMS), 0, SWITCH)
    whole = run_triple(triple, half, SWITCH, STEPS)

    params, opt_state = equivalent.convert_state(half, SWITCH)
    there, i = equivalent.convert_state_back(params, opt_state)
    assert int(i) == SWITCH
    check(there, half, exact=True)

    finished, _ = run_optax(tx, params, opt_state, SWITCH, STEPS)
    check(finished, triple.params_fn(whole), exact=equivalent.is_exact)

    params, opt_state = run_optax(tx, params, opt_state, SWITCH, 6)
    state, i = equivalent.convert_state_back(params, opt_state)
    assert int(i) == 6
    returned = run_triple(triple, state, 6, STEPS)
    check(returned, whole, exact=equivalent.is_exact)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_triple_as_a_transformation_is_itself(name: str, rate: str) -> None:
    triple = getattr(ours, name)(RATES[rate], **ARGUMENTS[name])
    tx = ours.to_optax(triple)
    assert isinstance(tx, optax.GradientTransformation)
    half = run_triple(triple, triple.init_fn(PARAMS), 0, SWITCH)
    whole = run_triple(triple, half, SWITCH, STEPS)
    start = tx.convert_state(half, SWITCH)
    params, state = start
    apply = jax.jit(tx.apply)
    for i in range(SWITCH, STEPS):
        params, state = apply(params, state, GRADS[i])
    back, i = tx.convert_state_back(params, state)
    assert int(i) == STEPS
    check(back, whole, exact=True)
    check(triple.params_fn(back), params, exact=True)
    finished, _ = run_optax(tx, *start, SWITCH, STEPS)
    check(finished, triple.params_fn(whole), exact=False)


def test_the_parameters_of_optax_hold() -> None:
    tx = ours.to_optax(ours.momentum(0.5, 0.5))
    params, state = {"w": jnp.ones(2)}, None
    state = tx.init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (2,)]  # they are not in it
    moved: Any = {"w": params["w"] + 10}  # by somebody else
    updates, state = tx.update({"w": jnp.ones(2)}, state, moved)
    after: Any = optax.apply_updates(moved, updates)
    assert after["w"].tolist() == [10.5, 10.5]
    with pytest.raises(
        ValueError, match="a triple computes new parameters, not updates: pass `params`"
    ):
        tx.update({"w": jnp.ones(2)}, state)


@pytest.mark.parametrize("tx", [optax.adamw(0.1), optax.chain(optax.clip(1.0), optax.lamb(0.1))])
def test_a_transformation_as_a_triple_is_itself(tx: optax.GradientTransformation) -> None:
    triple = ours.from_optax(tx)
    params, opt_state = run_optax(tx, PARAMS, tx.init(PARAMS), 0, SWITCH)
    state = run_triple(triple, triple.convert_state(params, opt_state), SWITCH, STEPS)
    whole = run_optax(tx, params, opt_state, SWITCH, STEPS)
    check(triple.convert_state_back(state), whole, exact=True)
    check(
        triple.params_fn(run_triple(triple, triple.init_fn(PARAMS), 0, STEPS)), whole[0], exact=True
    )
    packed = ours.pack_optimizer_state(ours.unpack_optimizer_state(state))
    assert same_structure(packed, state)


def test_transformations_get_their_extra_arguments_and_keep_dtypes() -> None:
    triple: Any = ours.from_optax(optax.chain(optax.polyak_sgd(), optax.scale(1.0)))
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state = triple.init_fn(params)
    after = triple.update_fn(0, {"w": jnp.ones(3)}, state, value=jnp.float32(0.5))
    assert triple.params_fn(after)["w"].dtype == jnp.bfloat16
    assert (triple.params_fn(after)["w"] < 1).all()
    with pytest.raises(errors.TreeMismatchError, match="w: expected an array, found nothing"):
        triple.update_fn(0, {"v": jnp.ones(3)}, state)
    with pytest.raises(errors.StepError):
        triple.update_fn(jnp.sin, {"w": jnp.ones(3)}, state)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rate", "dtypes", "exact"),
    [
        (0.1, ("bfloat16", "bfloat16"), True),
        (np.float32(0.1), ("bfloat16", "bfloat16"), False),
        (ours.exponential_decay(0.1, 3, 0.5), ("float32", "float32"), True),
        (ours.piecewise_constant([2], [0.1, 0.03]), ("float16", "float16"), False),
        (0.1, ("bfloat16", "float32"), False),
    ],
)
def test_what_is_exact_in_other_dtypes(rate: Any, dtypes: tuple[str, str], exact: bool) -> None:
    dtype, grads_dtype = dtypes
    params = jnp.asarray(np.linspace(-1.7, 2, 4), dtype)
    grads = [jnp.asarray(np.sin(np.arange(4.0) + i) * 3, grads_dtype) for i in range(4)]
    for name, arguments in [("sgd", {}), ("nesterov", {"mass": 0.8})]:
        equivalent = ours.optax_equivalent(name, step_size=rate, **arguments)
        triple, tx = equivalent.triple, equivalent.transformation
        half = run_triple(triple, triple.init_fn(params), 0, 2, grads)
        whole = run_triple(triple, half, 2, 4, grads)
        switched = run_optax(tx, *equivalent.convert_state(half, 2), 2, 4, grads)
        back, _ = equivalent.convert_state_back(*switched)
        for mine, other in zip(jax.tree.leaves(whole), jax.tree.leaves(back), strict=True):
            assert mine.dtype == other.dtype == dtype  # the triple's, whatever Optax kept
            if exact:
                np.testing.assert_array_equal(mine, other)
