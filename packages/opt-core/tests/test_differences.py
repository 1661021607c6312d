"""How two optimizers differ, by their descriptions."""

from __future__ import annotations

import dataclasses

import pytest
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.state_changes import Move, Side, differences, pair_leaves

Made = TransformationDescription
CLIP = Made("clip", settings={"max_delta": 1.0})
ADAM = Made("adam", settings={"b1": 0.9, "nesterov": False})
RATE = Made("scale_by_learning_rate", settings={"learning_rate": 0.1})


def side(*made: Made) -> Side:
    leaves = tuple(
        LeafDescription(
            (*one.group, one.name, str(one.number), "mu", "w"),
            one.group,
            one.name,
            one.number,
            ("mu",),
            ("w",),
            (0,),
            "moment",
            "stated",
        )
        for one in made
        if one.name == "adam"
    )
    names = ["/".join(leaf.path) for leaf in leaves]
    return Side(StateDescription(leaves, made), names, {}, lambda i: None, lambda i: None, leaves)


def told(old: Side, new: Side) -> list[str]:
    return list(differences(Move(old, new, pair_leaves(old, new).pairs)))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((ADAM, RATE), (ADAM, RATE), []),
        ((CLIP, ADAM), (ADAM, RATE), ["`clip` is gone", "`scale_by_learning_rate` is new"]),
        ((CLIP, ADAM), (ADAM, CLIP), ["the order `clip`, `adam` is now `adam`, `clip`"]),
    ],
)
def test_transformations(old: tuple[Made, ...], new: tuple[Made, ...], expected: list[str]) -> None:
    assert told(side(*old), side(*new)) == expected


def test_switches_are_told_and_rates_and_lengths_of_windows_are_not() -> None:
    window = {"every": Bearing("window", ("mini_step",))}
    settings = {"b1": 0.9, "nesterov": False, "every": 4}
    old = Made("adam", settings=settings, bearing=window)
    new = dataclasses.replace(old, settings={"b1": 0.8, "nesterov": True, "every": 8})
    assert told(side(old), side(new)) == [
        "`nesterov` of `adam` was False, is True",
    ]


def test_one_of_two_is_known_by_its_numbers() -> None:
    other = dataclasses.replace(ADAM, number=2, settings={"b1": 0.5, "nesterov": False})
    turned = [
        dataclasses.replace(ADAM, number=2),
        dataclasses.replace(other, number=1),
    ]
    assert told(side(ADAM, other), side(*reversed(turned))) == [
        "by their settings, `adam` was `adam#2`, `adam#2` was `adam`"
    ]
    changed = dataclasses.replace(other, settings={"b1": 0.6, "nesterov": False})
    assert told(side(ADAM, other), side(ADAM, changed)) == ["`b1` of `adam` was 0.5, is 0.6"]


def test_groups() -> None:
    outer = dataclasses.replace(ADAM, group=("one",))
    moved = dataclasses.replace(ADAM, group=("two",))
    assert told(side(outer), side(moved)) == ["group `one` is gone", "group `two` is new"]
