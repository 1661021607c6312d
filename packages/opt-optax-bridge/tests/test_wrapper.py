"""The contract of `OptaxWrapper`: steps, extra arguments, gradients, equality."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge
import optax
import optax.contrib
import pytest
from bridge_testing import (
    assert_close,
    constructor_of,
    definition,
    jitted_once,
    loss,
    make_params,
    third_step,
    third_step_by_optax,
    transformation,
)
from opt_core.errors import HyperParamError
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

NAMES = opt_optax_bridge.optimizer_names()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_optax(name: str) -> None:
    stepped = third_step(name)
    wanted = third_step_by_optax(name)
    assert_close((stepped.target, stepped.state.param_states), wanted, rtol=1e-6)
    assert int(stepped.state.step) == 3


# Extra arguments.


def takes_value(updates: Any, state: Any, params: Any = None, *, value: Any, **rest: Any) -> Any:
    return jax.tree.map(lambda u: -value * u, updates), state


TX = optax.GradientTransformationExtraArgs(lambda params: (), takes_value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tx",
    [
        TX,
        optax.partition({True: TX, False: optax.set_to_zero()}, {"b": False, "w": True}),
        optax.MultiSteps(TX, 1),
    ],
    ids=["itself", "partition", "MultiSteps"],
)
def test_they_reach_it_however_deep_and_traced_and_others_are_refused(tx: Any) -> None:
    optimizer = OptaxWrapper(tx).create(make_params())
    grads = jax.tree.map(jnp.ones_like, make_params())
    step = jitted_once(lambda optimizer, value: optimizer.apply_gradient(grads, value=value))
    for value in (0.5, 0.25):
        assert_close(step(optimizer, value).target["w"], make_params()["w"] - value)
    with pytest.raises(HyperParamError) as caught:
        optimizer.apply_gradient(grads, value=1.0, obj_fn=loss)
    assert "`obj_fn`" in str(caught.value)
    assert "`value`" not in str(caught.value)


@pytest.mark.parametrize(
    ("tx", "said"),
    [
        (optax.lbfgs(), "`grad`, `value`, `value_fn`: the update of this transformation needs it"),
        (
            constructor_of("reduce_on_plateau")(),
            "`value`: the update of this transformation needs it",
        ),
        (transformation("sophia"), "obj_fn must be provided"),
    ],
    ids=["lbfgs", "reduce_on_plateau", "sophia"],
)
def test_a_missing_extra_argument_is_named(tx: Any, said: str) -> None:
    optimizer = OptaxWrapper(tx).create(make_params())
    with pytest.raises((TypeError, ValueError), match=said):
        optimizer.apply_gradient(jax.grad(loss)(make_params()))


def counted(count: Any) -> Any:
    return 0.1 / (1 + count)


@pytest.mark.parametrize(
    ("tx", "name"),
    [
        (optax.sgd(counted), "count"),  # an argument of the schedule
        (optax.inject_hyperparams(optax.adam)(0.1), "learning_rate"),  # and of the constructor
        (optax.adamw(0.1, mask=lambda tree: jax.tree.map(bool, {"b": 0, "w": 1})), "tree"),
        (optax.MultiSteps(TX, 1), "mini_step"),
    ],
    ids=["schedule", "inject", "mask", "MultiSteps"],
)
def test_arguments_of_other_functions_are_not_those_of_an_update(tx: Any, name: str) -> None:
    optimizer = OptaxWrapper(tx).create(make_params())
    with pytest.raises(HyperParamError, match=f"`{name}`: neither a hyper-parameter"):
        optimizer.apply_gradient(make_params(), **{name: 0.5})


class Halved:
    """A transformation that is an object, with a compiled update."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, updates: Any, state: Any, params: Any = None, *, by: Any = 2.0) -> Any:
        return jax.tree.map(lambda u: -u / by, updates), state


def halved_by_key(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
    return jax.tree.map(lambda u: -u / extra_args["by"], updates), state


class HalvedByAsking(Halved):
    """It says which keywords it takes, as `opt_accumulate.MultiSteps` does."""

    def extra_arg_names(self, names: Any) -> frozenset[str]:
        return frozenset(names) & {"by"}

    def update(self, updates: Any, state: Any, params: Any = None, **rest: Any) -> Any:
        return jax.tree.map(lambda u: -u / rest["by"], updates), state


EXTRA = optax.GradientTransformationExtraArgs


@pytest.mark.parametrize(
    "tx",
    [
        Halved(),
        EXTRA(Halved().init, jax.jit(Halved().update)),
        optax.chain(EXTRA(Halved().init, halved_by_key), optax.scale(1.0)),
        HalvedByAsking(),
    ],
    ids=["object", "compiled", "by key", "by asking"],
)
def test_an_update_of_any_kind_is_asked(tx: Any) -> None:
    optimizer = OptaxWrapper(tx).create({"w": jnp.ones(2)})
    stepped = optimizer.apply_gradient({"w": jnp.ones(2)}, by=4.0)
    assert stepped.target["w"].tolist() == [0.75, 0.75]


# Identity.


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_other_arguments_make_another_definition(name: str) -> None:
    one = definition(name)
    numbers = [n for n, value in vars(one.hyper_params).items() if isinstance(value, float)]
    for argument in numbers:
        other = definition(name, **{argument: getattr(one.hyper_params, argument) + 0.5})
        assert other != one, argument
        opaque = OptaxWrapper(other.optax_optimizer)
        assert opaque != OptaxWrapper(one.optax_optimizer), argument


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A precision of a kind: the updates of a transformation, scaled."""

    factor: float

    def __call__(self, tx: Any) -> Any:
        return optax.chain(tx, optax.scale(self.factor))


def test_a_precision_is_around_the_transformation() -> None:
    plain = opt_optax_bridge.adam(0.1)
    scaled = plain.with_precision(Scaled(2.0))
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}
    step = jax.jit(lambda o, rate: o.apply_gradient(grads, learning_rate=rate))
    found = step(scaled.create(params), 0.25)
    expected = plain.create(params).apply_gradient(grads, learning_rate=0.5)
    assert_close(found.target, expected.target, rtol=1e-6)
    assert scaled == plain.with_precision(Scaled(2.0)) != plain.with_precision(Scaled(3.0))
    again = pickle.loads(pickle.dumps(scaled))
    assert again == scaled
    assert again.precision == Scaled(2.0)
    assert scaled.hyper_params.learning_rate == plain.hyper_params.learning_rate
    built = OptaxWrapper(optax.adam(0.5)).with_precision(Scaled(2.0)).create(params)
    assert_close(built.apply_gradient(grads).target, step(scaled.create(params), 0.5).target)


def test_what_is_no_precision_is_an_error() -> None:
    plain: Any = opt_optax_bridge.adam(0.1)
    with pytest.raises(TypeError, match=r"make a transformation of another.*; got 'bfloat16'"):
        plain.with_precision("bfloat16")
    with pytest.raises(TypeError, match="returned int"):
        plain.with_precision(lambda tx: 8)
    with pytest.raises(ValueError, match="has a precision"):
        plain.with_precision(Scaled(2.0)).with_precision(Scaled(3.0))
    with pytest.raises(ValueError, match=r"`chain`: .*Write `chain\(...\).with_precision"):
        opt_optax_bridge.chain(plain.with_precision(Scaled(2.0)), optax.scale(0.5))
    with pytest.raises(AttributeError, match="`precision` of a definition cannot change"):
        plain.precision = Scaled(2.0)
