"""Every float-valued argument of every optimizer acts at run time, and what cannot says so."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
import pytest
from bridge_testing import (
    are_close,
    arguments_of,
    assert_close,
    assert_same_bits,
    avals,
    constructor_of,
    inputs,
    jitted_once,
    make_params,
    step,
    third_step_by_optax,
    trained,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from opt_core import MultiOptimizer, Optimizer, freeze
from opt_core.errors import HyperParamError
from opt_optax_bridge import (
    overridable_hyper_params,
    resolve_hyper_params,
    wrap_optax_optimizer,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")

# Those that take seconds to trace or compile are for the slow tests.
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("lbfgs", "muon")))
    for name in opt_optax_bridge.optimizer_names()
]

# Arguments that an update depends on, but whose value makes no difference in the third step.
QUIET = {
    ("dog", "eps"),
    ("radam", "eps"),
    ("radam", "eps_root"),
    ("rprop", "eta_minus"),
    ("schedule_free_sgd", "weight_lr_power"),
    ("sophia", "b2"),
}


def overridable(name: str) -> tuple[str, ...]:
    return overridable_hyper_params(trained(name), **inputs(name)[1])


def result(optimizer: Optimizer) -> tuple[Any, Any]:
    return optimizer.target, optimizer.state.param_states


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_override_is_the_argument_of_the_constructor(name: str) -> None:
    optimizer, (grads, extra_args) = trained(name), inputs(name)
    functions = {k: v for k, v in extra_args.items() if callable(v)}
    arrays = {k: v for k, v in extra_args.items() if k not in functions}

    def overridden(optimizer: Optimizer, grads: Any, arrays: Any, values: Any) -> Optimizer:
        return optimizer.apply_gradient(grads, **arrays, **functions, **values)

    compiled = jitted_once(overridden)
    own = optimizer.optimizer_def.hyper_params
    moved = {n: 0.7 * getattr(own, n) + 0.01 for n in overridable(name)}
    all_moved = compiled(optimizer, grads, arrays, moved)
    assert_close(result(all_moved), third_step_by_optax(name, **moved))
    for argument in moved:
        for value in (0.4 * getattr(own, argument) + 0.03, 0.0, 0.9, 3.0, 30.0):
            values = {**moved, argument: value}
            one_other = compiled(optimizer, grads, arrays, values)
            if acts := not are_close(one_other, all_moved, rtol=1e-6, atol=0.0):
                break
        assert acts != ((name, argument) in QUIET), argument
        assert_close(result(one_other), third_step_by_optax(name, **values))
        assert avals(one_other) == avals(optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_float_is_overridable_unless_it_makes_no_difference(name: str) -> None:
    constructor = constructor_of(name)
    bound = inspect.signature(constructor).bind(**arguments_of(name, constructor))
    bound.apply_defaults()
    floats = {n: value for n, value in bound.arguments.items() if isinstance(value, float)}
    assert set(overridable(name)) <= set(floats)
    for argument in set(floats) - set(overridable(name)):
        changed = third_step_by_optax(name, **{argument: 0.5 * floats[argument] + 0.25})
        assert are_close(changed, third_step_by_optax(name), rtol=0.0, atol=0.0), argument


def test_an_override_promotes_nothing() -> None:
    """In bfloat16 a strong float32 would keep digits that Optax rounds away."""
    optimizer = opt_optax_bridge.sgd(0.5, momentum=0.9).create(make_params(jnp.bfloat16))
    overridden = step("sgd", optimizer, learning_rate=jnp.float32(0.1))
    built = step("sgd", opt_optax_bridge.sgd(0.1, momentum=0.9).create(optimizer.target))
    assert_same_bits(overridden.target, built.target)
    assert_same_bits(overridden.state, built.state)
    definition, grads = optimizer.optimizer_def, make_params(jnp.bfloat16)
    given = definition.update_hyper_params(learning_rate=jnp.float32(0.1))
    updates, _ = definition.compute_updates(given, optimizer.target, optimizer.state, grads)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


def test_a_schedule_gives_way_to_a_number_and_to_a_schedule() -> None:
    grads = {"w": jnp.ones(2)}
    half = optax.linear_schedule(1.0, 0.0, 2)
    optimizer = opt_optax_bridge.sgd(half).create({"w": jnp.zeros(2)}).apply_gradient(grads)
    assert optimizer.apply_gradient(grads).target["w"].tolist() == [-1.5, -1.5]
    by_number = jitted_once(lambda o, lr: o.apply_gradient(grads, learning_rate=lr))(
        optimizer, 0.25
    )
    assert by_number.target["w"].tolist() == [-1.25, -1.25]
    by_schedule = optimizer.apply_gradient(grads, learning_rate=lambda count: count * 4.0)
    assert by_schedule.target["w"].tolist() == [-5.0, -5.0]
    for stepped in (by_number, by_schedule):  # the count goes on
        assert avals(stepped) == avals(optimizer)
        assert_same_bits(stepped.apply_gradient(grads).target, stepped.target)


def test_hyper_params_replaces_all_and_overrides_come_after() -> None:
    optimizer, grads = trained("adamw"), inputs("adamw")[0]
    given = optimizer.optimizer_def.hyper_params.replace(learning_rate=0.3, b1=0.5)
    replaced = optimizer.apply_gradient(grads, hyper_params=given)
    assert_close(result(replaced), third_step_by_optax("adamw", learning_rate=0.3, b1=0.5))
    both = optimizer.apply_gradient(grads, hyper_params=given, b1=0.75, weight_decay=0.25)
    wanted = third_step_by_optax("adamw", learning_rate=0.3, b1=0.75, weight_decay=0.25)
    assert_close(result(both), wanted)


@wrap_optax_optimizer
def clipped(learning_rate: Any, *, clip: float = 1.0, decay: Any = 0.0) -> Any:
    """A constructor with a Python branch on a number."""
    parts = [optax.clip(clip)] if clip > 0 else []
    return optax.chain(*parts, optax.add_decayed_weights(decay), optax.sgd(learning_rate))


def test_a_float_that_decides_a_branch_is_structural_and_the_others_act() -> None:
    grads = {"w": jnp.full(2, 4.0)}
    optimizer = clipped(0.5).create({"w": jnp.ones(2)})
    integer = optimizer.apply_gradient(grads, learning_rate=np.int32(1))
    assert integer.target["w"].tolist() == [0.0, 0.0]
    assert overridable_hyper_params(optimizer) == ("learning_rate", "decay")
    stepped = optimizer.apply_gradient(grads, learning_rate=0.25, decay=1.0)
    assert stepped.target["w"].tolist() == [0.5, 0.5]
    with pytest.raises(HyperParamError) as caught:
        optimizer.apply_gradient(grads, clip=2.0, learning_rate=0.25)
    assert str(caught.value) == (
        "`clip` cannot be overridden at run time: it decides a Python branch, shapes or structure. "
        "Of this optimizer these may be: `learning_rate`, `decay`"
    )


def test_an_override_reaches_a_group_that_all_parameters_have_left() -> None:
    groups = [("w", "w", opt_optax_bridge.sgd(0.5))]
    rest = opt_optax_bridge.chain(opt_optax_bridge.clip(1.0), opt_optax_bridge.adam(0.5))
    optimizer = MultiOptimizer.from_rules(groups, rest=rest).create(
        {"w": jnp.ones(1), "b": jnp.ones(1)}
    )
    frozen, _ = freeze(optimizer, "b")
    stepped = frozen.apply_gradient({"w": jnp.ones(1)}, learning_rate=0.25)
    assert stepped.target["w"].tolist() == [0.75]
    resolved = resolve_hyper_params(frozen, learning_rate=0.25)
    assert float(resolved["rest"].learning_rate) == 0.25


def test_keywords_of_a_function_that_is_given_are_taken() -> None:
    def value_fn(params: Any, mode: str = "a") -> Any:
        return jnp.sum(params["w"] ** 2) * (2.0 if mode == "b" else 1.0)

    params = {"w": jnp.ones(2)}
    value, grads = jax.value_and_grad(lambda p: value_fn(p, mode="b"))(params)
    given = {"value": value, "grad": grads, "value_fn": value_fn, "mode": "b"}
    search = opt_optax_bridge.scale_by_backtracking_linesearch(2)
    definition = opt_optax_bridge.chain(opt_optax_bridge.sgd(1.0), search)
    optimizer, raw = definition.create(params), definition.optax_optimizer
    updates, _ = raw.update(grads, optimizer.state.param_states, params, **given)
    after = optimizer.apply_gradient(grads, **given)
    expected: Any = optax.apply_updates(params, updates)
    assert after.target["w"].tolist() == expected["w"].tolist()
    with pytest.raises(TypeError, match="mood"):  # ours, or Optax's own
        optimizer.apply_gradient(grads, **given, mood="b")


def test_an_override_that_varies_over_a_mesh_axis() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    optimizer = opt_optax_bridge.sgd(0.1).create({"w": jnp.ones(2)})

    def step(optimizer: Any, rates: Any) -> Any:
        return optimizer.apply_gradient({"w": jnp.ones(2)}, learning_rate=rates[0]).target["w"]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    assert jax.jit(mapped)(optimizer, jnp.array([0.5])).tolist() == [0.5, 0.5]
