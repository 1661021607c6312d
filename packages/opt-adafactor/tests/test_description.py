"""What the state means: dimensions, settings, and which of these bears on the momentum."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from adafactor_testing import rule
from opt_adafactor import Adafactor, HParamMap
from opt_core import StateDescription, describe_state


def described(shape: tuple[int, ...], letters: str, **options: Any) -> StateDescription:
    rules = HParamMap([(".*", rule(letters))])
    definition = Adafactor(
        0.1, factor_map=rules, respect_rank2_rules=True, min_dim_size_to_factor=2, **options
    )
    return describe_state(definition.create({"w": jnp.ones(shape)}))


def by_slot(found: StateDescription) -> dict[str, Any]:
    return {leaf.field[0]: (leaf.dimensions, leaf.role) for leaf in found.leaves}


UNUSED = ((None,), "other")


@pytest.mark.parametrize(
    ("letters", "row", "col"),
    [
        ("rc", (0,), (1,)),
        ("cr", (1,), (0,)),
        ("bcr", (0, 2), (0, 1)),
        ("rcb", (0, 2), (1, 2)),
        ("rrc", (0, 1), (2,)),
    ],
)
def test_factors_say_which_dimensions_they_keep_of_equal_ones(
    letters: str, row: tuple[int, ...], col: tuple[int, ...]
) -> None:
    found = described((4,) * len(letters), letters, beta1=0.9)
    everything = tuple(range(len(letters)))
    assert by_slot(found) == {
        "v_row": (row, "factored"),
        "v_col": (col, "factored"),
        "v": UNUSED,
        "m": (everything, "moment"),
    }


def test_settings_are_json() -> None:
    rules = HParamMap([("norm", None), (".*", rule("brc"))])
    definition = Adafactor(
        lambda step: 0.1, factor_map=rules, multiply_by_parameter_scale=HParamMap([(".*", False)])
    )
    found = describe_state(definition.create({"w": jnp.ones((2, 8, 8))}))
    (made,) = found.transformations
    assert made.settings["factor_map"] == (
        ("norm", None),
        (".*", ("BATCH", "ROW", "COLUMN")),
    )
    assert made.settings["multiply_by_parameter_scale"] == ((".*", False),)
    assert made.settings["decay_rate"] == 0.8
    assert made.settings["dtype_momentum"] == "float32"
    assert made.effect("multiply_by_parameter_scale") == "nothing"  # there is no momentum
    assert StateDescription.from_json(found.to_json()) == found


# What a change does to a run that goes on, measured after one more step.


def test_the_momentum_depends_on_the_scale() -> None:
    changed = Adafactor(0.1, beta1=0.9, multiply_by_parameter_scale=False)
    (made,) = describe_state(changed.create({"w": jnp.ones(2)})).transformations
    assert made.effect("multiply_by_parameter_scale") == "refused"
    assert made.effect("decay_rate") == "nothing"
