"""States go from one form to the other, and the run goes on as if nothing had been."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import opt_adafactor as ada
import optax
import pytest
from adafactor_testing import largest_difference, normal
from opt_adafactor import Adafactor
from opt_adafactor.errors import StateConversionError
from opt_core import Optimizer

PARAMS = {"w": normal(1, (6, 4)), "b": normal(2, (3,))}
GRADS = [{"w": normal(10 + t, (6, 4)), "b": normal(20 + t, (3,))} for t in range(4)]
SMALL: dict[str, Any] = {"min_dim_size_to_factor": 4}
MOMENTUM: list[dict[str, Any]] = [{}, {"beta1": 0.9}]


def train(optimizer: Optimizer, steps: Any) -> Optimizer:
    for t in steps:
        optimizer = optimizer.apply_gradient(GRADS[t])
    return optimizer


def train_optax(tx: Any, params: Any, state: Any, steps: Any) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):
        for t in steps:
            updates, state = tx.update(GRADS[t], state, params)
            params = optax.apply_updates(params, updates)
    return params, state


def transformations(options: dict[str, Any]) -> dict[str, Any]:
    momentum = {"momentum": options["beta1"]} if options else {}
    return {
        "adafactor": ada.adafactor(0.1, **SMALL, **options),
        "optax.adafactor": optax.adafactor(0.1, **SMALL, **momentum),
        "with a schedule": optax.adafactor(optax.linear_schedule(0.1, 0.1, 9), **SMALL, **momentum),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", MOMENTUM, ids=["plain", "momentum"])
@pytest.mark.parametrize("name", transformations({}))
def test_a_run_switches_to_optax_and_back(name: str, options: dict[str, Any]) -> None:
    tx = transformations(options)[name]
    definition = Adafactor(0.1, **SMALL, **options)
    expected = train(definition.create(PARAMS), range(4))
    optimizer = train(definition.create(PARAMS), range(1))
    fresh = tx.init(PARAMS)
    state = ada.to_optax_state(optimizer.state, fresh)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, fresh)
    params, state = train_optax(tx, optimizer.target, state, range(1, 3))
    back = ada.from_optax_state(state)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, optimizer.state)
    optimizer = train(optimizer.replace(state=back, target=params), range(3, 4))
    assert largest_difference(optimizer.target, expected.target) < 1e-6
    assert largest_difference(optimizer.state, expected.state) < 1e-6
    counts = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32]
    assert counts
    assert {int(count) for count in counts} == {3}


def test_what_has_no_counterpart() -> None:
    momentum = Adafactor(0.1, beta1=0.9, **SMALL).create(PARAMS).state
    plain = Adafactor(0.1, **SMALL).create(PARAMS).state
    for tx in (ada.adafactor(0.1, **SMALL), optax.adafactor(0.1, **SMALL)):
        with pytest.raises(StateConversionError, match="`state` has momentum, but `like` has no"):
            ada.to_optax_state(momentum, tx.init(PARAMS))
    with pytest.raises(StateConversionError, match=r"`like` must contain exactly .* found 0 in a"):
        ada.to_optax_state(plain, optax.sgd(0.1).init(PARAMS))
    two = optax.chain(ada.adafactor(0.1), ada.adafactor(0.1)).init(PARAMS)
    with pytest.raises(
        StateConversionError, match=r"`state` must contain exactly .* found 2 in a tuple"
    ):
        ada.from_optax_state(two)
    with pytest.raises(
        StateConversionError, match=r"`v_row` of `w`: expected shape \(1,\).*found \(4,\)"
    ):
        ada.to_optax_state(plain, ada.adafactor(0.1).init(PARAMS))
    with pytest.raises(StateConversionError, match="do not belong to the same parameters"):
        ada.to_optax_state(plain, ada.adafactor(0.1).init({"w": PARAMS["w"]}))
    one = {"b": jnp.ones((1,))}  # momentum of the shape of a placeholder
    moved = Adafactor(0.1, beta1=0.9).create(one).apply_gradient(one).state
    with pytest.raises(StateConversionError, match="`state` has momentum, but `like` has no"):
        ada.to_optax_state(moved, optax.adafactor(0.1).init(one))
    with pytest.raises(StateConversionError, match=r"`m` of `b`: expected shape \(3,\)"):
        ada.to_optax_state(plain, ada.adafactor(0.1, beta1=0.9, **SMALL).init(PARAMS))


def test_what_is_not_of_adafactor_is_left_alone() -> None:
    optimizer = train(Adafactor(0.1, beta1=0.9, **SMALL).create(PARAMS), range(1))
    own = ada.adafactor(0.1, beta1=0.9, **SMALL)
    theirs = optax.adafactor(0.1, momentum=0.9, **SMALL)
    schedule = optax.scale_by_schedule(optax.constant_schedule(1.0))
    for tx in (own, theirs):
        like: Any = optax.chain(schedule, tx, optax.ema(0.5)).init(PARAMS)
        before, state, after = ada.to_optax_state(optimizer.state, like)
        chex.assert_trees_all_equal((before, after), (like[0], like[2]))
        chex.assert_trees_all_equal(ada.from_optax_state(state), optimizer.state)
        chex.assert_trees_all_equal(ada.from_optax_state((before, state, after)), optimizer.state)
    first: Any = optax.chain(optax.ema(0.5), optax.scale_by_factored_rms()).init(PARAMS)
    assert ada.from_optax_state(first).param_states["w"].m.shape == (1,)


def test_schedules_of_injected_hyperparams_continue() -> None:
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    optimizer = train(Adafactor(schedule, **SMALL).create(PARAMS), range(2))
    tx = optax.inject_hyperparams(ada.adafactor, static_args=tuple(SMALL))(schedule, **SMALL)
    state = ada.to_optax_state(optimizer.state, tx.init(PARAMS))
    params, _ = train_optax(tx, optimizer.target, state, range(2, 3))
    expected = train(optimizer, range(2, 3))
    assert largest_difference(params, expected.target) < 1e-6
