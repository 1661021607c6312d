"""What `resolve_hyper_params` says is what the step does."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
import pytest
from bridge_testing import make_params
from opt_core import MultiOptimizer, Optimizer, OptimizerDef, describe
from opt_core.errors import HyperParamError
from opt_optax_bridge import (
    OptaxWrapper,
    chain,
    overridable_hyper_params,
    resolve_hyper_params,
    wrap_optax_optimizer,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")

GRADS = {"b": jnp.array([0.5, 0.25, -1.0]), "w": jnp.full((2, 3), 2.0)}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "linear": optax.linear_schedule(0.5, 0.0, 4),
    "compiled": jax.jit(optax.exponential_decay(0.5, 1, 0.9)),
    "of NumPy": lambda count: jnp.take(np.array([0.5, 0.25, 0.125, 1.0]), count),
}


def applied(optimizer: Optimizer, **overrides: Any) -> float:
    """The learning rate of a plain SGD step, measured."""
    stepped = optimizer.apply_gradient(GRADS, **overrides)
    rates = (optimizer.target["w"] - stepped.target["w"]) / GRADS["w"]
    np.testing.assert_allclose(rates, rates[0, 0], rtol=1e-5)
    return float(rates[0, 0])


def close(found: Any, wanted: Any) -> bool:
    return bool(np.isclose(found, wanted, rtol=2e-5, atol=1e-7))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
def test_it_is_the_rate_that_sgd_applies(schedule: Callable[[Any], Any]) -> None:
    optimizer = opt_optax_bridge.sgd(schedule).create(make_params())
    for count in range(4):
        found = resolve_hyper_params(optimizer).learning_rate
        assert close(found, applied(optimizer))
        assert close(found, schedule(count))
        assert (found.shape, found.dtype, found.weak_type) == ((), jnp.float32, False)
        optimizer = optimizer.apply_gradient(GRADS)


def test_overrides_are_what_it_says() -> None:
    optimizer = opt_optax_bridge.sgd(SCHEDULES["linear"]).create(make_params())
    optimizer = optimizer.apply_gradient(GRADS)
    for given in (0.75, jnp.bfloat16(0.5), np.float64(0.3), lambda count: 0.1 + 0.1 * count):
        found = resolve_hyper_params(optimizer, learning_rate=given).learning_rate
        assert close(found, applied(optimizer, learning_rate=given))
    own = optimizer.optimizer_def.hyper_params.replace(learning_rate=0.125)
    assert close(resolve_hyper_params(optimizer, hyper_params=own).learning_rate, 0.125)


@wrap_optax_optimizer
def multi_steps(learning_rate: Any) -> Any:
    return optax.MultiSteps(optax.sgd(learning_rate), 1)


@wrap_optax_optimizer
def looped(learning_rate: Any) -> Any:
    """Runs SGD inside a loop that makes one pass."""
    inner = optax.sgd(learning_rate)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        once = jnp.minimum(1, state[-1].count + 1)
        return jax.lax.fori_loop(0, once, lambda _, carry: inner.update(*carry), (updates, state))

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.parametrize("constructor", [multi_steps, looped], ids=["MultiSteps", "loop"])
def test_schedules_inside_branches_and_loops(constructor: Callable[..., Any]) -> None:
    optimizer = constructor(SCHEDULES["linear"]).create(make_params())
    for _ in range(3):
        assert close(resolve_hyper_params(optimizer).learning_rate, applied(optimizer))
        found = resolve_hyper_params(optimizer, learning_rate=0.75).learning_rate
        assert close(found, applied(optimizer, learning_rate=0.75))
        optimizer = optimizer.apply_gradient(GRADS)
    traced = jax.jit(lambda o: resolve_hyper_params(o).learning_rate)(optimizer)
    assert close(traced, applied(optimizer))


def test_a_schedule_of_many_counts_at_once_has_no_value() -> None:
    @wrap_optax_optimizer
    def scanned(learning_rate: Any) -> Any:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            _, rates = jax.lax.scan(lambda _, i: (None, learning_rate(i)), None, jnp.arange(3))
            return jax.tree.map(lambda u: -rates.sum() * u, updates), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    optimizer = scanned(SCHEDULES["linear"]).create(make_params())
    with pytest.raises(HyperParamError) as caught:
        resolve_hyper_params(optimizer)
    assert str(caught.value) == (
        "`learning_rate` has no single value in this update: its schedule is evaluated inside a "
        "`scan`, for many counts at once"
    )


def test_the_schedule_alone_is_computed() -> None:
    optimizer = opt_optax_bridge.adamw(SCHEDULES["linear"]).create(make_params())
    used = resolve_hyper_params(optimizer, weight_decay=0.01)
    assert close(used.weight_decay, 0.01)
    assert close(used.b2, 0.999)
    program = jax.make_jaxpr(lambda o: resolve_hyper_params(o).learning_rate)(optimizer)
    assert "sqrt" not in str(program)
    assert "sqrt" in str(jax.make_jaxpr(lambda o: o.apply_gradient(GRADS))(optimizer))


def test_extra_arguments_are_taken_and_needed() -> None:
    optimizer = opt_optax_bridge.polyak_sgd(0.5).create(make_params())
    assert close(resolve_hyper_params(optimizer, value=1.0, f_min=-2.0).f_min, -2.0)
    allowed = ("max_learning_rate", "scaling", "f_min", "eps")
    assert overridable_hyper_params(optimizer, value=1.0) == allowed
    with pytest.raises(TypeError, match="value"):
        resolve_hyper_params(optimizer, f_min=-2.0)


def test_a_schedule_with_two_values_in_one_update_has_none() -> None:
    @wrap_optax_optimizer
    def two_speeds(rate: optax.Schedule) -> optax.GradientTransformation:
        slow = optax.MultiSteps(optax.sgd(rate), 2).gradient_transformation()
        return optax.partition({"fast": optax.sgd(rate), "slow": slow}, {"a": "fast", "b": "slow"})

    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    optimizer = two_speeds(optax.linear_schedule(0.0, 1.0, 10)).create(params)
    assert float(resolve_hyper_params(optimizer).rate) == 0.0  # both counts are 0
    optimizer = optimizer.apply_gradient(params)
    assert math.isnan(resolve_hyper_params(optimizer).rate)


def grouped(**kwargs: Any) -> Any:
    rules = {
        "matrices": ("w", opt_optax_bridge.adamw(SCHEDULES["linear"])),
        "vectors": ("b", opt_optax_bridge.sgd(0.5)),
        "own": ("c", Own(None)),
    }
    rules |= kwargs
    definition = MultiOptimizer(list(rules.values()), names=list(rules))
    return definition.create({name: jnp.ones(2) for name in "wbc"})


class Own(OptimizerDef):
    def init_state(self, params: Any) -> Any:
        return OptaxWrapper(optax.sgd(0.1)).init_state(params)

    def apply_gradient(self, hyper_params: Any, params: Any, state: Any, grads: Any) -> Any:
        return params, state


def test_of_groups_it_is_a_dict() -> None:
    optimizer = grouped()
    used = resolve_hyper_params(optimizer)
    assert list(used) == ["matrices", "vectors", "own"]
    assert close(used["matrices"].learning_rate, 0.5)
    assert close(used["vectors"].learning_rate, 0.5)
    assert used["own"] is None
    with pytest.raises(HyperParamError, match="group `vectors`"):
        resolve_hyper_params(optimizer, weight_decay=0.25)
    used = resolve_hyper_params(
        optimizer,
        weight_decay=0.25,
        group_overrides={"vectors": {"learning_rate": 0.125}},
        missing="ignore",
    )
    assert close(used["matrices"].weight_decay, 0.25)
    assert close(used["vectors"].learning_rate, 0.125)
    with pytest.raises(TypeError, match=r"one of its groups: `definition\.split\(optimizer\)"):
        overridable_hyper_params(optimizer)


def test_learning_rates_are_scaled() -> None:
    optimizer, grads = grouped(), {name: jnp.ones(2) for name in "wbc"}

    @jax.jit
    def scaled(factor: Any) -> Any:
        overrides = opt_optax_bridge.scale_learning_rate(optimizer, factor)
        return resolve_hyper_params(optimizer, **overrides), optimizer.apply_gradient(
            grads, **overrides
        )

    used, stepped = scaled(0.5)
    assert close(used["matrices"].learning_rate, 0.25)
    assert close(stepped.target["b"][0], 0.75)
    some = opt_optax_bridge.scale_learning_rate(optimizer, {"vectors": 2.0})
    assert some == {"group_overrides": {"vectors": {"learning_rate": 1.0}}}
    two = chain(opt_optax_bridge.sgd(0.5), opt_optax_bridge.sgd(0.25)).create(grads)
    assert {k: float(v) for k, v in opt_optax_bridge.scale_learning_rate(two, 2.0).items()} == {
        "sgd.learning_rate": 1.0,
        "sgd_1.learning_rate": 0.5,
    }
    with pytest.raises(HyperParamError, match="there is no `learning_rate` to scale"):
        opt_optax_bridge.scale_learning_rate(OptaxWrapper(optax.sgd(0.1)).create(grads), 0.5)
    with pytest.raises(HyperParamError, match=r"`factor` names \['vektors'\]; the groups"):
        opt_optax_bridge.scale_learning_rate(optimizer, {"vektors": 2.0})


def test_the_table_of_groups_shows_the_rate_of_the_next_step() -> None:
    optimizer = grouped()

    def shown(optimizer: Any) -> list[str]:
        return [row.hyper_params for row in describe(optimizer).rows[:2]]

    assert shown(optimizer) == [
        "learning_rate=0.5 (polynomial_schedule)",
        "learning_rate=0.5",
    ]
    stepped = optimizer.apply_gradient({name: jnp.ones(2) for name in "wbc"})
    assert shown(stepped)[0] == "learning_rate=0.375 (polynomial_schedule)"
    assert shown(jax.eval_shape(lambda: optimizer))[0] == "learning_rate=polynomial_schedule"
