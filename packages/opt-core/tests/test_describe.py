"""The table of groups."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def in_bfloat16(tx: Any) -> Any:
    return tx


class Rounded(Momentum):
    """Stores its parameters in its own way."""

    precision = staticmethod(in_bfloat16)


def is_weight(path: str, leaf: Any) -> bool:
    return path.endswith("w")


def test_precision_has_a_column_functions_have_names_and_long_patterns_are_cut() -> None:
    rules = [("w", is_weight, Rounded(0.5)), ("b", "a/b|" + "x" * 80, Momentum(0.5))]
    found = describe(MultiOptimizer.from_rules(rules).create(make_params()))
    assert [row.precision for row in found.rows] == ["in_bfloat16", ""]
    lines = str(found).splitlines()
    assert lines[0].split()[-2:] == ["precision", "hyper-parameters"]
    assert lines[1].index("in_bfloat16") == lines[0].index("precision")
    assert "is_weight" in lines[1]
    assert "xxx...  " in lines[2]
    assert max(map(len, lines)) < 200


def test_rows_are_data() -> None:
    definition = MultiOptimizer((traversal(lambda path: path.endswith("/w")), Momentum(0.5)))
    first, rest = describe(definition.create(make_params())).rows
    assert first.paths == ("a/w", "c/w")
    assert (first.elements, first.state_bytes) == (2052, 4 * 2052)
    assert first.pattern == "ModelParamTraversal"
    assert first.hyper_params == "learning_rate=0.5, beta=0.5"
    assert (rest.paths, rest.definition, rest.state_bytes) == (("a/b",), "frozen", 0)


def test_numbers_and_functions_among_states_and_parameters() -> None:
    class Counts(OptimizerDef):
        def init_state(self, params: Any) -> OptimizerState:
            return OptimizerState(jnp.zeros((), jnp.int32), {"n": 0, "f": 1.5})

    params = {"w": jnp.ones(3), "x": 1.0, "act": jax.nn.relu}
    definition = MultiOptimizer.from_rules([("w", "w|x", Counts(None))], rest=FROZEN)
    first, rest = describe(definition.create(params)).rows
    assert (first.elements, first.state_bytes) == (4, 8)
    assert (rest.paths, rest.elements) == (("act",), 0)


@dataclasses.dataclass(frozen=True)
class Rates:
    each: Any = (np.ones(2),)
    names: Any = dataclasses.field(default_factory=list)
    scale: float = 1.0


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        (Rates((np.ones(2),), [], 1.0), ""),
        (Rates((np.zeros(1),), ["a"], 2.0), "each=(array([0.]),), names=['a'], scale=2.0"),
    ],
)
def test_defaults_that_are_arrays_or_made_are_left_out(rates: Rates, shown: str) -> None:
    definition = MultiOptimizer.from_rules([("all", ".*", Schedules(rates))])
    assert describe(definition.create(make_params())).rows[0].hyper_params == shown


def test_other_optimizers_have_no_table() -> None:
    with pytest.raises(
        TypeError, match="its definition is of type Momentum, not a `MultiOptimizer`"
    ):
        describe(Momentum().create(make_params()))


def test_a_schedule_is_shown_by_its_value_and_its_factory() -> None:
    @dataclasses.dataclass(frozen=True)
    class Rate:
        learning_rate: Any

    class Scheduled(Schedules):
        def resolve_hyper_params(
            self, hyper_params: Any, params: Any, state: Any, **extra_args: Any
        ) -> Any:
            return Rate(hyper_params.learning_rate(state.step))

    def factory() -> Any:
        return lambda step: 0.25 * jnp.float32(step + 1)

    def shown(optimizer: Any) -> str:
        return describe(optimizer).rows[0].hyper_params

    rate = factory()
    rate.__qualname__ = "factory.<locals>.<lambda>"
    optimizer = MultiOptimizer(("a/.*", Scheduled(Rate(rate)))).create(make_params())
    assert shown(optimizer) == "learning_rate=0.25 (factory)"
    later = optimizer.replace(state=optimizer.state.replace(step=jnp.int32(1)))
    assert shown(later) == "learning_rate=0.5 (factory)"
    assert shown(jax.eval_shape(lambda: optimizer)) == "learning_rate=factory"
