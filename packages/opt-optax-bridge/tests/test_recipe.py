import inspect
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from opt_core.errors import HyperParamError
from opt_optax_bridge import OptaxWrapper, wrap_optax_optimizer
from opt_optax_bridge._recipe import Recipe, is_number


def by_annotation(annotation: Any) -> Callable[..., Any]:
    def constructor(rate: Any) -> Any:
        return rate

    constructor.__annotations__["rate"] = annotation
    return constructor


@pytest.mark.parametrize(
    "annotation",
    [
        inspect.Parameter.empty,
        Any,
        "Any",
        optax.Schedule,
        optax.ScalarOrSchedule,
        "base.ScalarOrSchedule",
        float | Callable[[int], float] | None,
    ],
    ids=str,
)
def test_a_schedule_goes_where_one_is_meant(annotation: Any) -> None:
    recipe = Recipe(by_annotation(annotation), (optax.linear_schedule(1.0, 0.0, 2),), {})
    assert "rate" in recipe.hyper_params.__dataclass_fields__


@pytest.mark.parametrize(
    "annotation", [Callable[[Any], Any], "Callable", Any | Callable[[Any], Any], str], ids=str
)
def test_other_functions_are_not_schedules(annotation: Any) -> None:
    recipe = Recipe(by_annotation(annotation), (optax.linear_schedule(1.0, 0.0, 2),), {})
    assert not recipe.hyper_params.__dataclass_fields__


def record(
    rate: float,
    decay: float = 0.5,
    *,
    schedule: optax.ScalarOrSchedule = 1.0,
    steps: int = 5,
    momentum: float | None = None,
    flag: bool = False,
    mask: Any | Callable[[Any], Any] | None = None,
    dtype: Any = jnp.float32,
    **rest: Any,
) -> dict[str, Any]:
    """In the place of a constructor: returns what it is called with."""
    return dict(locals())


def test_arguments_include_defaults_and_keywords() -> None:
    recipe = Recipe(record, (0.1,), {"momentum": 0.9, "other": 3.0})
    assert recipe.arguments == {
        "rate": 0.1,
        "decay": 0.5,
        "schedule": 1.0,
        "steps": 5,
        "momentum": 0.9,
        "flag": False,
        "mask": None,
        "dtype": jnp.float32,
        "other": 3.0,
    }
    assert recipe.name == "record"


@pytest.mark.parametrize(
    ("argument", "value", "can_change"),
    [
        ("rate", 1, True),  # an int where a float is meant
        ("rate", jnp.float32(1), True),
        ("rate", np.float64(1), True),
        ("rate", jnp.ones(2), False),
        ("rate", jnp.int32(1), True),
        ("rate", True, False),
        ("steps", 7, False),
        ("steps", 7.0, True),
        ("momentum", None, False),
        ("momentum", 0.9, True),
        ("flag", True, False),
        ("schedule", optax.linear_schedule(1.0, 0.0, 10), True),
        ("schedule", lambda count: jnp.ones(2) * count, False),  # no scalar
        ("schedule", lambda params: jax.tree.map(jnp.ones_like, params["w"]), False),
        ("mask", lambda params: 1.0, False),  # not said to be a schedule
        ("dtype", jnp.bfloat16, False),  # maps a count to a float too
        ("dtype", jax.nn.relu, False),
        ("unheard_of", 2.0, True),
        ("unheard_of", 2, False),
    ],
)
def test_which_arguments_can_change(argument: str, value: Any, can_change: bool) -> None:
    recipe = Recipe(record, (), {"rate": 0.1, argument: value})
    assert (argument in recipe.hyper_params.__dataclass_fields__) == can_change


def flat(recorded: dict[str, Any]) -> dict[str, Any]:
    rest = recorded.pop("rest")
    return {**recorded, **rest}


NAMES = ("rate", "decay", "schedule", "momentum", "other")


@hypothesis.settings(deadline=None, max_examples=40, derandomize=True, database=None)
@hypothesis.given(
    positional=st.integers(0, 2),
    given=st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1)),
    overrides=st.dictionaries(st.sampled_from(NAMES), st.floats(2, 3)),
)
def test_building_again_changes_the_overridden_alone(
    positional: int, given: dict[str, float], overrides: dict[str, float]
) -> None:
    given = {"rate": 0.25, **given}
    args = tuple(given.pop(name, 0.75) for name in ("rate", "decay")[:positional])
    recipe = Recipe(record, args, given)
    known = {k: v for k, v in overrides.items() if k in recipe.arguments}
    assert flat(recipe.build(**known)) == {**flat(recipe.build()), **known}


def test_a_number_in_the_place_of_a_schedule_is_a_constant_schedule() -> None:
    recipe = Recipe(record, (0.1,), {"schedule": optax.linear_schedule(1.0, 0.0, 10)})
    built = recipe.build(schedule=0.25)["schedule"]
    assert built(0) == built(7) == 0.25
    assert recipe.build(schedule=abs)["schedule"] is abs


def test_what_cannot_be_bound_has_no_hyper_params() -> None:
    assert Recipe(record, (), {}).arguments == {}  # the call itself will complain
    assert not Recipe(record, (), {}).hyper_params.__dataclass_fields__


def test_hyper_params_are_a_frozen_pytree_that_pickles() -> None:
    hyper_params = Recipe(record, (0.1,), {}).hyper_params
    assert jax.tree.leaves(hyper_params) == [0.1, 0.5, 1.0]
    assert type(hyper_params).__name__ == "record_hyper_params"
    assert pickle.loads(pickle.dumps(hyper_params)) == hyper_params
    again: Any = jax.tree.structure(Recipe(record, (0.1,), {}).hyper_params)
    assert again == jax.tree.structure(hyper_params)
    with pytest.raises(AttributeError):
        hyper_params.rate = 0.2
    assert hyper_params.replace(rate=0.2).rate == 0.2


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int8(1), jnp.bfloat16(1), np.array(1)])
def test_numbers(value: Any) -> None:
    assert is_number(value)


@pytest.mark.parametrize(
    "value", [True, np.True_, 1j, None, "1", np.ones(1), jax.random.key(0), [1.0], jnp.bool_(1)]
)
def test_not_numbers(value: Any) -> None:
    assert not is_number(value)


def test_a_list_that_changes_later_changes_nothing() -> None:
    rates = [0.1]
    make = wrap_optax_optimizer(lambda rates, factor=1.0: optax.sgd(factor * sum(rates)))
    before = make(rates)
    rates[0] = 0.5
    optimizer = before.create({"w": jnp.ones(2)})
    grads = {"w": jnp.ones(2)}
    assert optimizer.apply_gradient(grads).target["w"][0] == pytest.approx(0.9)
    assert optimizer.apply_gradient(grads, factor=2.0).target["w"][0] == pytest.approx(0.8)
    assert make(rates) != before


def test_an_iterator_is_not_an_argument() -> None:
    make = wrap_optax_optimizer(lambda parts: optax.chain(*parts))
    with pytest.raises(TypeError, match="pass a list"):
        make(optax.sgd(rate) for rate in [0.1])


def test_however_arguments_are_given_it_is_the_same_definition() -> None:
    adam = wrap_optax_optimizer(optax.adam)
    assert adam(0.1) == adam(learning_rate=0.1) == adam(0.1, b1=0.9)
    assert hash(adam(0.1)) == hash(adam(learning_rate=0.1, b1=0.9))
    assert adam(0.1) != adam(0.1, b1=0.8)


CLIP = {"at": 0.5}


def test_a_constructor_that_builds_something_else_now(monkeypatch: pytest.MonkeyPatch) -> None:
    make = wrap_optax_optimizer(lambda rate: optax.chain(optax.clip(CLIP["at"]), optax.sgd(rate)))
    definition = make(0.1)
    optimizer, grads = definition.create({"w": jnp.ones(2)}), {"w": jnp.ones(2)}
    assert optimizer.apply_gradient(grads, rate=0.2).target["w"][0] == pytest.approx(0.9)
    monkeypatch.setitem(CLIP, "at", 1.0)
    assert optimizer.apply_gradient(grads).target["w"][0] == pytest.approx(0.95)
    with pytest.raises(HyperParamError, match="has changed"):
        optimizer.apply_gradient(grads, rate=0.2)
    assert make(0.1) != definition


@pytest.mark.parametrize("name", ["hyper_params", "optax_optimizer", "recipe"])
def test_a_definition_does_not_change(name: str) -> None:
    definition = wrap_optax_optimizer(optax.adam)(0.1)
    with pytest.raises(AttributeError, match="cannot change"):
        setattr(definition, name, None)


class Scaled(OptaxWrapper):
    def __init__(self, optax_optimizer: Any, scale: float) -> None:
        super().__init__(optax_optimizer)
        self.scale = scale


def test_attributes_of_a_subclass_count() -> None:
    one = Scaled(optax.sgd(0.1), 1.0)
    assert one == Scaled(optax.sgd(0.1), 1.0)
    assert one != Scaled(optax.sgd(0.1), 5.0)
    again = pickle.loads(pickle.dumps(one))
    assert again == one
    assert again.scale == 1.0
