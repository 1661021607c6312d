import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from bridge_testing import labels
from opt_optax_bridge._signatures import captured_arrays, named_arguments, takes_any_keyword


def update(updates: Any, state: Any, params: Any = None, *, value: Any = None, **rest: Any) -> Any:
    del value, rest, params
    return updates, state


TX = optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize(
    "tx",
    [
        TX,
        optax.chain(optax.clip(1.0), TX),
        optax.named_chain(("clip", optax.clip(1.0)), ("mine", TX)),
        optax.masked(TX, labels()),
        optax.partition({True: TX, False: optax.set_to_zero()}, labels()),
        optax.MultiSteps(TX, 2),
        optax.GradientTransformationExtraArgs(TX.init, functools.partial(update, params=None)),
    ],
    ids=["itself", "chain", "named_chain", "masked", "partition", "MultiSteps", "partial"],
)
def test_arguments_are_found_however_deep(tx: Any) -> None:
    assert {"value", "updates"} <= named_arguments(tx.update)
    assert "obj_fn" not in named_arguments(tx.update)


def test_any_keyword() -> None:
    assert takes_any_keyword(TX.update)
    assert not takes_any_keyword(lambda updates, state, params=None: None)


def test_captured_arrays() -> None:
    key, table = jax.random.key(0), jnp.arange(3.0)
    tx = optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(lambda count: table[count]))
    found = captured_arrays(tx.update)
    assert any(array is table for array in found)
    assert any(array is key for array in captured_arrays(tx.init))
    assert captured_arrays(optax.sgd(0.1).init) == []


def test_variables_that_were_never_assigned_are_nothing() -> None:
    def inner(value: Any) -> Any:
        return late(value)

    assert named_arguments(inner) == {"value"}
    late: Any = abs
    assert named_arguments(inner) == {"value"}


def test_what_captures_itself_ends() -> None:
    def loop(value: Any) -> Any:
        return loop(value)

    assert named_arguments(loop) == {"value"}
