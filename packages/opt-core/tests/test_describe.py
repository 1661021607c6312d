"""The table of groups."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from core_testing import Momentum
from flax_optim import Adam, traversal
from opt_core import FROZEN, MultiOptimizer, OptimizerDef, OptimizerState, describe


class Schedules(OptimizerDef):
    """Has a state without arrays of its own."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.random.key(0))


def make_params() -> Any:
    return {"a": {"w": jnp.ones((64, 32)), "b": jnp.ones(32)}, "c": {"w": jnp.ones((2, 2))}}


def test_the_table_in_full() -> None:
    inner = MultiOptimizer.from_rules([("w", ".*/w", Adam(0.1))], rest=Schedules(None))
    definition = MultiOptimizer.from_rules([("a", "a/.*", inner)], rest=FROZEN)
    expected = """\
group   pattern   leaves  elements     state  definition  hyper-parameters
a/w     '.*/w'         1     2,048  16.0 KiB  Adam        learning_rate=0.1
a/rest  the rest       1        32       8 B  Schedules
rest    the rest       1         4       0 B  frozen
total                  3     2,084  16.0 KiB"""
    assert str(describe(definition.create(make_params()))) == expected
    assert str(describe(jax.eval_shape(lambda: definition.create(make_params())))) == expected


def test_rows_are_data() -> None:
    definition = MultiOptimizer((traversal(lambda path: path.endswith("/w")), Momentum(0.5)))
    first, rest = describe(definition.create(make_params())).rows
    assert first.paths == ("a/w", "c/w")
    assert (first.elements, first.state_bytes) == (2052, 4 * 2052)
    assert first.pattern == "ModelParamTraversal"
    assert first.hyper_params == "learning_rate=0.5, beta=0.5"
    assert (rest.paths, rest.definition, rest.state_bytes) == (("a/b",), "frozen", 0)


def test_functions_and_sets_have_names_and_long_patterns_are_cut() -> None:
    def is_weight(path: str, leaf: Any) -> bool:
        return path.endswith("w")

    rules = [("w", is_weight, Momentum()), ("b", "a/b|" + "x" * 80, Momentum())]
    table = str(describe(MultiOptimizer.from_rules(rules, rest=FROZEN).create(make_params())))
    assert "is_weight" in table
    assert "xxx...  " in table
    assert len(max(table.splitlines(), key=len)) < 200


def test_other_optimizers_have_no_table() -> None:
    with pytest.raises(TypeError, match="its definition is a Momentum, no `MultiOptimizer`"):
        describe(Momentum().create(make_params()))
