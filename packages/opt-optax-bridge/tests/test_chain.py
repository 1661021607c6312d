"""`chain`: the hyper-parameters of its parts are its own."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
import pytest
from bridge_testing import (
    assert_same_bits,
    avals,
    jitted_once,
    loss,
    make_params,
)
from opt_core.errors import HyperParamError
from opt_optax_bridge import chain, overridable_hyper_params

pytestmark = pytest.mark.usefixtures("optax_promotion")
SCHEDULE = optax.linear_schedule(0.5, 0.0, 10)


def clipped_adamw(**arguments: Any) -> Any:
    return chain(opt.clip_by_global_norm(1.0), opt.adamw(**{"learning_rate": 0.5, **arguments}))


def test_the_overrides_of_all_parts_act_and_compile_once() -> None:
    optimizer = clipped_adamw(learning_rate=SCHEDULE).create(make_params())
    step = jitted_once(
        lambda o, *values: o.apply_gradient(
            jax.grad(loss)(o.target), **dict(zip(names, values, strict=True))
        )
    )
    names = ("learning_rate", "weight_decay", "max_norm")
    for values in ((0.25, 0.5, 0.125), (0.5, 0.0, 2.0)):
        params, state = optimizer.target, optimizer.state.param_states
        rate, decay, norm = values
        raw: Any = optax.chain(
            optax.clip_by_global_norm(norm),
            optax.adamw(optax.constant_schedule(rate), weight_decay=decay),
        )
        optimizer = step(optimizer, *values)
        updates, state = raw.update(jax.grad(loss)(params), state, params)
        expected: Any = optax.apply_updates(params, updates)
        for name in expected:
            assert jnp.allclose(optimizer.target[name], expected[name], rtol=1e-5)
        assert avals(optimizer.state.param_states) == avals(state)
    assert overridable_hyper_params(optimizer)[:2] == ("max_norm", "learning_rate")


def test_what_two_parts_have_goes_by_part_and_name() -> None:
    definition = chain(opt.sgd(0.5), opt.sgd(0.25), last=opt.sgd(1.0))
    optimizer = definition.create({"w": jnp.zeros(1)})
    grads = {"w": jnp.full(1, 8.0)}

    def moved(**overrides: float) -> float:
        return float(optimizer.apply_gradient(grads, **overrides).target["w"][0])

    assert moved() == -1.0
    assert moved(**{"sgd.learning_rate": 1.0}) == -2.0
    assert moved(**{"sgd_1.learning_rate": 1.0, "last.learning_rate": 0.5}) == -2.0
    with pytest.raises(HyperParamError) as caught:
        moved(learning_rate=0.1)
    assert str(caught.value) == (
        "`learning_rate` is a hyper-parameter of 3 parts: `sgd.learning_rate`, "
        "`sgd_1.learning_rate`, `last.learning_rate`. Say which: "
        "`apply_gradient(grads, **{'sgd.learning_rate': ...})`."
    )
    used = opt.resolve_hyper_params(optimizer, **{"sgd.learning_rate": 1.0})
    assert {name: float(getattr(used, name)) for name in used.__dataclass_fields__} == {
        "sgd.learning_rate": 1.0,
        "sgd_1.learning_rate": 0.25,
        "last.learning_rate": 1.0,
    }


def test_a_name_of_one_part_may_be_given_with_the_part() -> None:
    optimizer = chain(clip=opt.clip(1.0), adam=opt.adam(0.5)).create({"w": jnp.zeros(1)})
    grads = {"w": jnp.full(1, 8.0)}
    by_name = optimizer.apply_gradient(grads, max_delta=0.5)
    assert_same_bits(optimizer.apply_gradient(grads, **{"clip.max_delta": 0.5}), by_name)
    with pytest.raises(HyperParamError, match=r"`clip.max_delta` and `max_delta` are the same"):
        optimizer.apply_gradient(grads, **{"clip.max_delta": 0.5, "max_delta": 1.0})
    with pytest.raises(HyperParamError, match=r"`clap.max_delta`: neither a .*`b1`"):
        optimizer.apply_gradient(grads, **{"clap.max_delta": 0.5})
    with pytest.raises(HyperParamError, match="`nesterov` cannot be overridden at run time"):
        optimizer.apply_gradient(grads, nesterov=True)


def test_chains_in_chains_and_definitions_in_wrappers() -> None:
    inner = chain(opt.scale_by_adam(), opt.scale_by_learning_rate(SCHEDULE))
    definition = chain(
        opt.clip(1.0),
        opt.masked(inner, {"w": True, "b": False}),
        opt.multi_transform({"w": opt.scale(1.0), "b": opt.sgd(0.5)}, {"w": "w", "b": "b"}),
    )
    fields = definition.hyper_params.__dataclass_fields__
    assert {"max_delta", "b1", "step_size"} < set(fields)
    rates = [name for name in fields if name.endswith("learning_rate")]
    assert rates == ["scale_by_learning_rate.learning_rate", "b.learning_rate"]
    optimizer = definition.create(make_params())
    grads = jax.grad(loss)(optimizer.target)
    stepped = optimizer.apply_gradient(grads, **dict.fromkeys(rates, 0.0))
    assert_same_bits(stepped.target, optimizer.target)


def test_one_sequence_or_several_arguments() -> None:
    parts: list[Any] = [opt.clip(1.0), optax.sgd(0.5)]
    assert chain(*parts) == chain(parts) == chain(tuple(parts))
    assert hash(chain(*parts)) == hash(chain(parts))
    assert chain(*parts) != chain(*reversed(parts))
    assert chain(optax.sgd(0.5)).create(make_params()).target.keys() == make_params().keys()
    with pytest.raises(TypeError) as caught:
        chain(opt.clip(1.0), optax.sgd)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "`chain` takes definitions and transformations; got a function. Call its constructor first."
    )


def test_the_name_of_a_part_may_have_a_dot() -> None:
    definition = chain(opt.sgd(0.5), **{"decoder.0": opt.sgd(1.0)})
    optimizer = definition.create({"w": jnp.zeros(1)})
    stepped = optimizer.apply_gradient({"w": jnp.ones(1)}, **{"decoder.0.learning_rate": 0.25})
    assert stepped.target["w"].tolist() == [0.125]
