"""Fields of optimizer states, by the containers that they are in."""

import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from opt_partition._memory.state_fields import state_fields

PARAMS = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


class Own(NamedTuple):
    mu: Any


class Keyless:
    def __init__(self, first: Any, second: Any) -> None:
        self.both = (first, second)


jax.tree_util.register_pytree_node(
    Keyless, lambda k: (k.both, None), lambda _, both: Keyless(*both)
)


def counted(tx: Any, params: Any = PARAMS) -> dict[str, int]:
    state = tx.init(params)
    fields = state_fields(state, params)
    assert len(fields) == len(jax.tree.leaves(state))
    return dict(Counter(fields))


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (
            optax.adam(0.1),
            {"ScaleByAdamState.count": 1, "ScaleByAdamState.mu": 2, "ScaleByAdamState.nu": 2},
        ),
        (optax.sgd(0.1), {}),
        (
            optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
            {
                "InjectStatefulHyperparamsState.count": 1,
                "InjectStatefulHyperparamsState.hyperparams": 2,
                "TraceState.trace": 2,
            },
        ),
        (
            optax.masked(optax.trace(0.9), {"w": True, "b": False}),
            {"TraceState.trace": 1},
        ),
        (
            optax.partition(
                {"x": optax.trace(0.9), "y": optax.scale_by_rss()}, {"w": "x", "b": "y"}
            ),
            {"TraceState.trace": 1, "ScaleByRssState.sum_of_squares": 1},
        ),
    ],
)
def test_states_of_optax(tx: Any, expected: dict[str, int]) -> None:
    assert counted(tx) == expected


def test_fields_of_the_parameters_own_containers_are_not_fields_of_the_state() -> None:
    params = [Layer(jnp.ones((2, 2)), jnp.ones(2)), Layer(jnp.ones((2, 2)), None)]
    assert counted(optax.trace(0.9), params) == {"TraceState.trace": 3}
    # A parameter's name does not matter, nor that it is the name of a field.
    assert counted(optax.trace(0.9), Own(jnp.ones(2))) == {"TraceState.trace": 1}


def test_states_per_parameter_and_states_without_names() -> None:
    state: Any = {"w": Own(jnp.ones(2)), "b": Own(jnp.ones(2))}
    assert state_fields(state, PARAMS) == ["Own.mu", "Own.mu"]
    assert state_fields(({"momentum": PARAMS},), PARAMS) == ["momentum", "momentum"]
    assert state_fields(Keyless(PARAMS, 1.0), PARAMS) == ["Keyless.0", "Keyless.0", "Keyless.1"]
    assert state_fields(jnp.ones(2), PARAMS) == ["ArrayImpl"]
    assert state_fields((None, ()), PARAMS) == []
