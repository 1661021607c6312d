"""To Optax and back: runs that switch in the middle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import optax
import pytest
from jax.example_libraries import optimizers as theirs
from opt_legacy_stax import errors
from stax_testing import same_structure

SWITCH, STEPS = 7, 20
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
# Two or three units of float32's last place, relative to the largest entry, after 13 updates; the
# most measured was 2.1e-7, with jax 0.8 to 0.12 on x86.
TOLERANCE = 1e-6


def make(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "b": [jnp.asarray(rng.normal(size=3), jnp.float32)],
    }


PARAMS, *GRADS = (make(seed) for seed in range(STEPS + 1))
RATES = {"number": 0.05, "schedule": ours.exponential_decay(0.05, 10, 0.5)}


def run_triple(triple: Any, state: Any, start: int, stop: int) -> Any:
    update = jax.jit(triple.update_fn)
    for i in range(start, stop):
        state = update(jnp.int32(i), GRADS[i], state)
    return state


@functools.cache  # a transformation is a tuple of functions; each is compiled once
def compiled_step(tx: Any) -> Any:
    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run_optax(tx: Any, params: Any, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    step = compiled_step(tx)
    for i in range(start, stop):
        params, state = step(params, state, GRADS[i])
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

    params, opt_state = run_optax(tx, params, opt_state, SWITCH, 12)
    state, i = equivalent.convert_state_back(params, opt_state)
    assert int(i) == 12
    returned = run_triple(triple, state, 12, STEPS)
    check(returned, whole, exact=equivalent.is_exact)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_states_are_those_that_optax_makes(name: str) -> None:
    equivalent = ours.optax_equivalent(name, step_size=0.1, **ARGUMENTS[name])
    fresh = equivalent.transformation.init(PARAMS)
    _, converted = equivalent.convert_state(equivalent.triple.init_fn(PARAMS), 0)
    assert same_structure(converted, fresh)
    for a, b in zip(jax.tree.leaves(converted), jax.tree.leaves(fresh), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_array_equal(a, b)


def test_a_state_of_jax_converts_too() -> None:
    other = theirs.adam(0.1)
    state = run_triple(other, other.init_fn(PARAMS), 0, 3)
    equivalent = ours.optax_equivalent("adam", step_size=0.1)
    params, opt_state = equivalent.convert_state(state, 3)
    finished, _ = run_optax(equivalent.transformation, params, opt_state, 3, 6)
    check(finished, other.params_fn(run_triple(other, state, 3, 6)), exact=False)


@pytest.mark.sample(5)
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


def test_it_is_one_of_several_in_a_chain() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), ours.to_optax(ours.sgd(1.0)))
    params, _ = run_optax(tx, PARAMS, tx.init(PARAMS), 0, 1)
    moved = jax.tree.map(jnp.subtract, PARAMS, params)
    assert float(optax.tree.norm(moved)) == pytest.approx(1.0, rel=1e-5)


def test_scalars_of_sm3_and_triples_of_ones_own() -> None:
    @ours.optimizer
    def hidden() -> Any:  # keeps its parameter doubled
        return lambda x: {"y": 2 * x}, lambda i, g, s: {"y": s["y"] - g}, lambda s: s["y"] / 2

    params, grads = (
        {"s": jnp.float32(1.0), "w": jnp.ones(3)},
        {"s": jnp.float32(1), "w": jnp.ones(3)},
    )
    for triple in (ours.sm3(0.1), hidden()):
        tx, state = ours.to_optax(triple), triple.init_fn(params)
        found, opt_state = tx.convert_state(state, 0)
        for i in range(3):
            state = triple.update_fn(i, grads, state)
            found, opt_state = tx.apply(found, opt_state, grads)
        check(found, triple.params_fn(state), exact=True)
        check(tx.convert_state_back(found, opt_state)[0], state, exact=True)


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


@pytest.mark.parametrize("triple", [ours.sm3(0.1), theirs.adam(0.1)], ids=["ours", "jax"])
def test_there_and_back_again(triple: Any) -> None:
    tx = ours.to_optax(triple)
    state = triple.init_fn(PARAMS)
    params, opt_state = tx.convert_state(state, 3)
    back, i = tx.convert_state_back(params, opt_state)
    assert int(i) == 3
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


NO = (
    "Optax has no equivalent of this `{0}`: {1}. Use `to_optax({0}(...))`, which wraps the triple "
    "itself as a transformation."
)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        (
            "adamax",
            {},
            (
                "Optax adds `eps` to the gradient inside the maximum, the triple adds it to the "
                "result; they agree only for `eps=0`"
            ),
        ),
        (
            "adam",
            {"upstream_numerics": True},
            "Optax rounds like the default numerics, not like those of JAX's module",
        ),
    ],
)
def test_no_equivalent(name: str, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.NoEquivalentError) as caught:
        ours.optax_equivalent(name, step_size=0.1, **arguments)
    assert str(caught.value) == NO.format(name, reason)


def test_no_equivalent_of_scalars_and_strangers() -> None:
    equivalent = ours.optax_equivalent("sm3", step_size=0.1)
    state = equivalent.triple.init_fn({"a": jnp.ones(2), "s": jnp.ones(())})
    with pytest.raises(errors.NoEquivalentError) as caught:
        equivalent.convert_state(state, 0)
    assert str(caught.value) == NO.format(
        "sm3", "`optax.sm3` does not support scalars, and parameter `s` is one"
    )
    with pytest.raises(errors.NoEquivalentError) as caught:
        ours.optax_equivalent("adamw", step_size=0.1)
    assert str(caught.value).startswith("`name` must be one of sgd, momentum, nesterov, adagrad,")
    with pytest.raises(errors.ScheduleError):
        ours.optax_equivalent("sgd", step_size="x")
    with pytest.raises(TypeError):
        ours.optax_equivalent("sgd", learning_rate=0.1)
