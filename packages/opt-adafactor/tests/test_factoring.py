"""Rules, the heuristic, and the shapes of the state that follow from them."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from adafactor_testing import rule
from opt_adafactor import HEURISTIC_RULE, Adafactor, HParamMap
from opt_adafactor.errors import FactorRuleError, UnknownNameError

ONE = (1,)


def shapes(shape: tuple[int, ...], letters: Any, **options: Any) -> tuple[Any, ...]:
    """The shapes of `v_row`, `v_col` and `v` of one parameter."""
    if letters != "no map":
        value = rule(letters) if isinstance(letters, str) else letters
        options["factor_map"] = HParamMap([("^w$", value)])
    definition = Adafactor(0.1, **options)
    state = jax.eval_shape(definition.init_state, {"w": jnp.zeros(shape)}).param_states["w"]
    assert state.m.shape == ONE
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    return state.v_row.shape, state.v_col.shape, state.v.shape


@pytest.mark.parametrize(
    ("shape", "letters", "expected"),
    [
        ((16, 3, 4, 8), "rbcc", ((16, 3), (3, 4, 8), ONE)),
        ((16, 3, 24), "rbc", ((16, 3), (3, 24), ONE)),
        ((16, 3), "nb", (ONE, ONE, (16, 3))),
        ((4, 3, 6), "rnc", ((4, 3), (3, 6), ONE)),
        ((4, 3, 6), "rrb", ((4, 3, 6), (6,), ONE)),  # odd, but T5X's: rows without columns
        ((24, 4, 16), None, (ONE, ONE, (24, 4, 16))),
        ((32, 16), None, (ONE, ONE, (32, 16))),
        # Explicit rules of rank 2 and less are ignored, as in T5X.
        ((32, 16), "cr", ((16,), (32,), ONE)),
        ((32, 16), "rc", ((16,), (32,), ONE)),
        ((32, 16), "nn", ((16,), (32,), ONE)),
        ((4, 32), "nn", (ONE, ONE, (4, 32))),
        ((), "", (ONE, ONE, ())),
    ],
)
def test_shapes_by_rule(shape: Any, letters: Any, expected: Any) -> None:
    assert shapes(shape, letters, min_dim_size_to_factor=8) == expected


@pytest.mark.parametrize(
    ("shape", "min_dim", "expected"),
    [
        ((24, 16), 8, ((16,), (24,), ONE)),
        ((16, 24), 8, ((16,), (24,), ONE)),
        ((128, 130), 128, ((128,), (130,), ONE)),
        ((64, 63), 64, (ONE, ONE, (64, 63))),
        ((2, 1), 0, ((1,), (2,), ONE)),
        ((1,), 0, (ONE, ONE, ONE)),
    ],
)
@pytest.mark.parametrize("letters", ["no map", HEURISTIC_RULE], ids=["no map", "heuristic"])
def test_shapes_by_size(shape: Any, min_dim: int, letters: Any, expected: Any) -> None:
    assert shapes(shape, letters, min_dim_size_to_factor=min_dim) == expected


def test_rules_of_rank_2_can_be_respected() -> None:
    respect: dict[str, Any] = {"respect_rank2_rules": True, "min_dim_size_to_factor": 8}
    assert shapes((32, 16), "rc", **respect) == ((32,), (16,), ONE)
    assert shapes((4, 4), "rc", **respect) == ((4,), (4,), ONE)  # whatever the size
    assert shapes((32, 16), "nn", **respect) == (ONE, ONE, (32, 16))
    assert shapes((16,), "n", **respect) == (ONE, ONE, (16,))


def test_rules_may_be_written_as_names() -> None:
    assert shapes((16, 3, 24), ["row", "Batch", "col"]) == ((16, 3), (3, 24), ONE)
    with pytest.raises(UnknownNameError, match="`diagonal`"):
        shapes((16, 3, 24), ["row", "batch", "diagonal"])


def test_ignored_rules_are_warned_about_once_and_only_where_it_matters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rules = HParamMap([("kept", rule("nn")), (".*", rule("rc"))])
    definition = Adafactor(0.1, factor_map=rules, min_dim_size_to_factor=8)
    # By size `swapped` is factored too, and whether its rows are called columns changes nothing.
    params = {"kept": jnp.ones((16, 8)), "swapped": jnp.ones((16, 8)), "small": jnp.ones((4, 4))}
    with caplog.at_level(logging.WARNING, "opt_adafactor"):
        optimizer = definition.create(params)
        for _ in range(2):
            optimizer = jax.jit(lambda o: o.apply_gradient(o.target))(optimizer)
    (record,) = caplog.records
    assert "differently for: `kept`, `small`. `respect_rank2_rules=True`" in record.getMessage()


def test_a_rank_above_2_needs_a_rule() -> None:
    for letters in ("no map", HEURISTIC_RULE):
        with pytest.raises(FactorRuleError, match=r"`w` has shape \(2, 3, 4\)") as caught:
            shapes((2, 3, 4), letters)
        assert "`factor_map`" in str(caught.value)
        assert "`None` not to factor" in str(caught.value)


def test_a_rule_must_fit() -> None:
    with pytest.raises(
        FactorRuleError, match=r"`w` has 2 dimensions, \(ROW, COLUMN\), but its shape \(2, 3, 4\)"
    ):
        shapes((2, 3, 4), "rc")
    with pytest.raises(FactorRuleError, match=r"of `w` must be `None`, `HEURISTIC_RULE` or"):
        shapes((2, 3), 5)


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        (jnp.ones(3, jnp.int32), "int32"),
        (jnp.ones(3, jnp.complex64), "complex64"),
        (7, "a int"),
    ],
)
def test_only_real_floating_point_parameters(leaf: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"`params`.*`a/w` is {found}"):
        Adafactor(0.1).create({"a": {"w": leaf}})
