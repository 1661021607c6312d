"""Leaves that are stored in codes, and parameters with more digits than they can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from opt_core import MultiOptimizer, OptimizerDef, OptimizerState
from opt_core._storage import PlainOptimizer, storages

pytestmark = pytest.mark.internals


@dataclasses.dataclass(frozen=True)
class Way:
    """256 even steps, or a parameter of which a half is missing."""

    name: str
    fields: tuple[str, ...] = ()
    dtype: str = "float32"
    is_exact: bool = False

    def to_data(self) -> dict[str, Any]:
        raise NotImplementedError  # nothing is written here

    def decode(self, *arrays: jax.Array) -> jax.Array:
        codes, scale = arrays
        return codes.astype(jnp.float32) / 255 * jnp.repeat(scale, 2)

    def encode(self, values: jax.Array) -> Any:
        raise NotImplementedError  # nothing is stored again here


EVEN, REST = Way("even8", ("codes", "scale")), Way("rest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Even:
    """A leaf in 256 even steps."""

    codes: Any
    scale: Any

    def leaf_storage(self) -> Way:
        return EVEN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Low:
    """The remainders of parameters, and moments in codes."""

    low: Any
    moments: Any

    def params_storage(self) -> tuple[str, Way]:
        return "low", REST


class Stored(OptimizerDef):
    """Parameters of bfloat16 with remainders; others are as they are."""

    def init_state(self, params: Any) -> OptimizerState:
        low = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.int16) if is_half(x) else (), params)
        ones = jax.tree.map(lambda x: jnp.ones(x.shape), params)
        moments = jax.tree.map(lambda x: Even(x.astype(jnp.uint8) * 255, x[::2]), ones)
        return OptimizerState(jnp.zeros((), jnp.int32), Low(low, moments))


def is_half(x: Any) -> bool:
    return bool(x.dtype == jnp.bfloat16)


def test_a_plain_optimizer_has_leaves_in_place_of_codes() -> None:
    groups = MultiOptimizer.from_rules([("one", "c", Stored(None)), ("two", "a|b", Stored(None))])
    params = {"a": jnp.ones(2), "b": jnp.ones(4, jnp.bfloat16), "c": jnp.ones(2, jnp.bfloat16)}
    optimizer = groups.create(jax.eval_shape(lambda: params))
    states = optimizer.state.param_states
    # of `c`, then of `a` and `b`; two arrays for the codes of each
    assert storages(states) == [REST, EVEN, EVEN, REST, *[EVEN] * 4]
    plain = PlainOptimizer(optimizer)
    assert [str(x.dtype) for x in plain.optimizer.target.values()] == ["float32"] * 3
    assert plain.ways(7) == [None, REST, REST, None, *[EVEN] * 3]
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), states)
    values = jax.tree.leaves(jax.jit(plain.plain_state)(ones))
    assert [len(x) for x in values] == [2, 2, 4]
    assert all((x == 1 / 255).all() for x in values)
