"""What a wrapped constructor remembers of its call: which arguments can change, and identity."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
import pytest
from opt_core.errors import HyperParamError
from opt_optax_bridge import wrap_optax_optimizer


@wrap_optax_optimizer
def recorded(
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
) -> Any:
    return optax.identity()


def fields_of(definition: Any) -> tuple[str, ...]:
    return tuple(definition.hyper_params.__dataclass_fields__)


LINEAR = optax.linear_schedule(1.0, 0.0, 10)


@pytest.mark.parametrize(
    ("argument", "value", "can_change"),
    [
        ("rate", 1, True),  # an int where a float is meant
        ("rate", jnp.int32(1), True),
        ("rate", jnp.ones(2), False),
        ("steps", 7, False),
        ("momentum", 0.9, True),
        ("schedule", LINEAR, True),
        ("schedule", lambda count: jnp.ones(2) * count, False),  # no scalar
        ("schedule", lambda params: jax.tree.map(jnp.ones_like, params["w"]), False),
        ("mask", lambda params: 1.0, False),  # not said to be a schedule
        ("dtype", jnp.bfloat16, False),  # maps a count to a float too
        ("unheard_of", 2.0, True),
    ],
)
def test_which_arguments_can_change(argument: str, value: Any, can_change: bool) -> None:
    assert (argument in fields_of(recorded(**{"rate": 0.1, argument: value}))) == can_change


@pytest.mark.parametrize(
    ("annotation", "is_schedule"),
    [
        ("base.ScalarOrSchedule", True),
        (float | Callable[[int], float] | None, True),
        (Any | Callable[[Any], Any], False),
        (str, False),
    ],
    ids=str,
)
def test_a_schedule_goes_where_one_is_meant(annotation: Any, is_schedule: bool) -> None:
    def constructor(rate: Any) -> Any:
        return optax.sgd(rate)

    constructor.__annotations__["rate"] = annotation
    assert fields_of(wrap_optax_optimizer(constructor)(LINEAR)) == ("rate",) * is_schedule


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
    parts = wrap_optax_optimizer(lambda parts: optax.chain(*parts))
    with pytest.raises(TypeError, match="pass a list"):
        parts(optax.sgd(rate) for rate in [0.1])


def test_however_arguments_are_given_it_is_the_same_definition() -> None:
    assert opt.adam(0.1) == opt.adam(learning_rate=0.1) == opt.adam(0.1, b1=0.9)
    assert hash(opt.adam(0.1)) == hash(opt.adam(learning_rate=0.1, b1=0.9))
    assert opt.adam(0.1) != opt.adam(0.1, b1=0.8)
    assert opt.adam(LINEAR) == opt.adam(optax.linear_schedule(1.0, 0.0, 10)) != opt.adam(0.1)
    assert opt.adam(LINEAR) != opt.adam(optax.linear_schedule(1.0, 0.5, 10))
    for name in ("hyper_params", "optax_optimizer", "recipe"):
        with pytest.raises(AttributeError, match="cannot change"):
            setattr(opt.adam(0.1), name, None)


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
