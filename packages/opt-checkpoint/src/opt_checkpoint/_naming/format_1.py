"""Schemas of format 1, which named transformations after their factories, as today's.

They were written until definitions described their states: settings had the names of captured
variables, functions and arrays were digests that nothing computes any more.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from opt_core import Bearing

from opt_checkpoint._naming.schema import (
    LeafInfo,
    Names,
    Schema,
    Transformation,
    checked,
    leaf_name,
    read_record,
)

_DIGEST = ":sha256"
_DIMENSIONS = "dimensions:"
_MADE_BY = "init:"
# Of `opt_accumulate`, and of variables that stand for arguments.
_RENAMED: Final = {
    "every_k": "every_k_schedule",
    "every_k_schedule.every_k_schedule": "every_k_schedule",
    "mean": "use_grad_mean",
}
_CONTAINERS = frozenset({"masked", "process"})  # keep nothing and do nothing of their own


@dataclasses.dataclass(frozen=True)
class _Window:
    """What format 1 knew of a transformation with windows."""

    settings: tuple[str, ...]
    bearing: Bearing
    roles: Mapping[str, str]


_WINDOWS: Final = {
    "multi_steps": _Window(
        ("every_k_schedule", "use_grad_mean"),
        Bearing("window", ("mini_step",)),
        {"acc_grads": "accumulator"},
    ),
    "apply_every": _Window(("k",), Bearing("window", ("count",), "k"), {"grad_acc": "accumulator"}),
    "sam": _Window(
        ("sync_period",), Bearing("window", ("steps_since_sync",)), {"cache": "params_copy"}
    ),
}


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: Names
    shape: tuple[int, ...]
    dtype: str
    kind: str
    parameter: Names | None = None
    group: Names = ()
    transformation: str = ""
    type: str = ""
    axes: tuple[Any, ...] | None = None
    value: int | None = None


@dataclasses.dataclass(frozen=True)
class _Transformation:
    name: str
    group: Names = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class _Schema:
    leaves: tuple[_Leaf, ...]
    optimizer: tuple[_Transformation, ...] = ()
    groups: Mapping[str, tuple[Names, ...]] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def schema_of_format_1(data: Any) -> Schema:
    """Returns today's schema of the JSON data of one in format 1.

    Raises:
      LoadError: they describe none; says where.
    """
    old = read_record(_Schema, data, "schema")
    dimensions = {
        (made.group, name.removeprefix(_DIMENSIONS)): str(value)
        for made in old.optimizer
        for name, value in made.settings.items()
        if name.startswith(_DIMENSIONS)
    }
    leaves = tuple(_leaf(leaf, dimensions) for leaf in old.leaves)
    return checked(Schema(leaves, tuple(_numbered(old.optimizer)), old.groups, old.versions))


def _leaf(leaf: _Leaf, dimensions: Mapping[tuple[Names, str], str]) -> LeafInfo:
    fields = vars(leaf).copy()
    del fields["type"]
    below = leaf.path[2 * len(leaf.group) + 2 :] if leaf.transformation else ()
    window = _WINDOWS.get(leaf.transformation.partition("#")[0])
    role = window.roles.get(below[0], "") if window is not None and below else ""
    told = dimensions.get((leaf.group, leaf_name(below))) if below else None
    dims = None if told is None else _dimensions(told)
    return LeafInfo(**fields, role=role, dimensions=dims)


def _dimensions(told: str) -> tuple[int | None, ...] | None:
    parts = told.split(",") if told else []
    if not all(part == "-" or part.isdecimal() for part in parts):
        return None
    return tuple(None if part == "-" else int(part) for part in parts)


def _numbered(given: Sequence[_Transformation]) -> Iterator[Transformation]:
    """Numbers those whose order in names format 1 did not know as they come, without settings."""
    names = [(made.group, _name(str(made.settings.get(_MADE_BY, made.name)))) for made in given]
    unknown = {like for like, made in zip(names, given, strict=True) if made.number is None}
    counts: dict[tuple[Names, str], int] = {}
    for like, made in zip(names, given, strict=True):
        if like[1] in _CONTAINERS:
            continue
        number = counts[like] = counts.get(like, 0) + 1
        settings = _settings(made)
        if like in unknown and names.count(like) > 1:
            same = [_settings(x) for name, x in zip(names, given, strict=True) if name == like]
            settings = settings if all(x == settings for x in same) else {}
        elif made.number is not None:
            number = made.number
        window = _WINDOWS.get(like[1])
        bearing = {} if window is None else dict.fromkeys(window.settings, window.bearing)
        yield Transformation(like[1], like[0], settings, number, bearing)


def _settings(made: _Transformation) -> dict[str, Any]:
    """Those that are arguments, by their names."""
    found: dict[str, Any] = {}
    for name, value in made.settings.items():
        bare = name.strip("_")
        bare = _RENAMED.get(bare, bare)
        if not name.endswith((_DIGEST, _MADE_BY)) and not set(bare) & set(".[:"):
            found[bare] = value
    if _MADE_BY in made.settings:
        found["update"] = made.name
    return found


def _name(factory: str) -> str:
    words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    snake = re.sub(words, "_", factory).lower()
    return snake.removeprefix("scale_by_").removesuffix("_state").strip("_") or factory
