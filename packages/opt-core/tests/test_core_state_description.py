"""Descriptions print, compare, hash, come back from JSON, and tell how optimizers differ."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.errors import DescriptionError


def leaf(**changes: Any) -> LeafDescription:
    given: dict[str, Any] = {
        "path": ("0", "mu", "decoder", "w"),
        "group": (),
        "transformation": "adam",
        "number": 1,
        "field": ("mu",),
        "parameter": ("decoder", "w"),
        "dimensions": (0, 1),
        "role": "moment",
        "source": "stated",
    }
    return LeafDescription(**(given | changes))


MADE = TransformationDescription(
    "multi_steps",
    2,
    ("fast", "a/b"),
    {"every_k_schedule": 4, "rates": [0.1, {"b": None}], "name": "é\n", "eps": math.inf, "x": True},
    {
        "every_k_schedule": Bearing("window", ("mini_step",)),
        "rates": Bearing("window", ("count",), "x"),
        "name": Bearing("refused"),
    },
    "stated",
)
WHOLE = StateDescription(
    (
        leaf(),
        leaf(dimensions=None, number=2, source="types"),
        leaf(field=(), parameter=None, dimensions=(None,), group=("fast", "a/b"), role="other"),
        leaf(path=(), dimensions=(), parameter=()),
    ),
    (MADE, TransformationDescription("adam")),
)


def test_json_comes_back_exactly() -> None:
    again = StateDescription.from_json(WHOLE.to_json())
    assert again == WHOLE
    assert hash(again) == hash(WHOLE)
    assert again.to_json() == WHOLE.to_json()
    assert pickle.loads(pickle.dumps(WHOLE)) == WHOLE


def test_the_table_in_full() -> None:
    assert str(WHOLE).splitlines() == [
        "transformation  field  parameter  dims  role    source",
        "adam            mu     decoder/w  0,1   moment  stated",
        "adam#2          mu     decoder/w  ?     moment  types",
        "fast/a~1b/adam                    -     other   stated",
        "adam            mu     .                moment  stated",
        "",
        "fast/a~1b/multi_steps#2: every_k_schedule=4 (window), rates=(0.1, (b=None))",
        "    (window), name=é  (refused), eps=inf, x=True",
        "adam",
    ]
    long = ("decoder", "layers_10", "self_attention", "relative_positions", "query", "kernel")
    wide = leaf(parameter=long, field=("inner", "a_field_with_a_long_name"), group=("fast",))
    lines = str(StateDescription((wide,), ())).splitlines()
    assert max(map(len, lines)) <= 80
    assert "query/kernel" in lines[1]


def broken(**changes: Any) -> Any:
    row = WHOLE.to_data()["leaves"][0]
    return {"leaves": [row | changes], "transformations": []}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "`description`: expected a mapping, found list"),
        ({"leaves": []}, "missing 1 required positional argument: 'transformations'"),
        (broken(role="moments"), "leaves/0/role`: expected one of moment, second_moment"),
        (broken(dimensions=["0"]), "leaves/0/dimensions/0`: expected an integer, found '0'"),
    ],
)
def test_data_that_describe_no_state(data: Any, said: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        StateDescription.from_json(json.dumps(data))
    assert said in str(caught.value)


def test_text_and_settings_that_are_not_json() -> None:
    with pytest.raises(DescriptionError, match="`text` is not JSON"):
        StateDescription.from_json("{")
    with pytest.raises(DescriptionError, match="`settings/f/0`: expected a JSON value, found a"):
        TransformationDescription("a", settings={"f": [print]})
