"""Leaves that are stored in codes, and parameters with more digits than they can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_core import MultiOptimizer, Optimizer, OptimizerDef, OptimizerState
from opt_core._storage import (
    EXTRAS,
    PlainOptimizer,
    decode,
    join,
    split,
    storages,
    stored_as,
)

pytestmark = pytest.mark.internals

TABLE = tuple(i / 255 for i in range(256))
FORM = {"codec": "even8", "version": 1, "table": TABLE, "squared": False, "axis": 0, "block": 2}
EVEN = {**FORM, "dtype": "float32"}
NAME = "even8-v1 2 along 0 float32"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Even:
    """A leaf in 256 even steps."""

    codes: Any
    scale: Any

    def leaf_storage(self) -> dict[str, Any]:
        return EVEN

    def with_values(self, values: jax.Array) -> Even:
        raise NotImplementedError  # nothing is stored again here


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Low:
    """The remainders of parameters, and moments in codes."""

    low: Any
    moments: Any

    def params_storage(self) -> tuple[str, str]:
        return "low", "remainder"


class Stored(OptimizerDef):
    """Parameters of bfloat16 with remainders; others are as they are."""

    def init_state(self, params: Any) -> OptimizerState:
        low = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.int16) if is_half(x) else (), params)
        ones = jax.tree.map(lambda x: jnp.ones(x.shape), params)
        moments = jax.tree.map(lambda x: Even(x.astype(jnp.uint8) * 255, x[::2]), ones)
        return OptimizerState(jnp.zeros((), jnp.int32), Low(low, moments))


def is_half(x: Any) -> bool:
    return bool(x.dtype == jnp.bfloat16)


def params() -> dict[str, jax.Array]:
    return {
        "a": jnp.ones(2),
        "b": jnp.full(4, 2.0, jnp.bfloat16),
        "c": jnp.full(2, 3.0, jnp.bfloat16),
    }


def grouped() -> Optimizer:
    groups = MultiOptimizer.from_rules([("one", "c", Stored(None)), ("two", "a|b", Stored(None))])
    made: Optimizer = groups.create(params())
    return made


@pytest.mark.parametrize("how", sorted(EXTRAS))
def test_a_parameter_is_what_it_was_split_into(how: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, np.uint32)
    bits = bits[(bits >> 23) & 0xFF < 0xFE]  # finite, also when rounded up
    master = jnp.asarray(bits.view(np.float32))
    param, extra = split(how, master)
    assert param.dtype == jnp.bfloat16
    again = np.asarray(join(how, param, extra))
    if how != "kahan":
        np.testing.assert_array_equal(again.view(np.uint32), bits)
    else:
        normal = np.abs(master) > 1e-30
        np.testing.assert_allclose(again[normal], np.asarray(master)[normal], rtol=2**-16)


def test_codes_of_whole_and_of_broken_blocks() -> None:
    codes = jnp.array([255, 51, 255], jnp.uint8)
    values = decode(EVEN, codes, jnp.array([2.0, 3.0]))
    np.testing.assert_allclose(values, [2.0, 0.4, 3.0], rtol=1e-6)
    squares = decode({**EVEN, "squared": True}, codes, jnp.array([2.0, 3.0]))
    np.testing.assert_allclose(squares, [4.0, 0.16, 9.0], rtol=1e-6)
    assert decode({**EVEN, "table": (), "block": 0}, jnp.ones(3, jnp.bfloat16)).tolist() == [1] * 3


def test_a_state_says_how_each_leaf_is_stored() -> None:
    states = grouped().state.param_states
    # of `c`, then of `a` and `b`; two arrays for the codes of each
    assert list(stored_as(states)) == ["remainder", NAME, NAME, "remainder", *[NAME] * 4]
    assert storages(states) == {NAME: EVEN}
    plain = jax.jit(PlainOptimizer(grouped()).plain_state)(states)
    assert [leaf.tolist() for leaf in jax.tree.leaves(plain)] == [[1, 1], [1, 1], [1, 1, 1, 1]]
    assert list(stored_as({"mu": 1.0})) == [""]
