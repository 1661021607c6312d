"""The two states of a move: their descriptions, and the values of their small leaves."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from opt_core._description.values import (
    LeafDescription,
    StateDescription,
    TransformationDescription,
)
from opt_core._paths import Names

Made: TypeAlias = tuple[Names, str, int]
"""A transformation: group, name, number."""

TRAINED: Final = frozenset(
    {"moment", "second_moment", "accumulator", "params_copy", "factored", "statistic"}
)
"""Roles of leaves whose values training determines."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A state: an existing one, in memory or in a checkpoint, or one to make.

    Attributes:
      description: of the state.
      names: of its leaves, for messages.
      owners: the group, in a `MultiOptimizer`, of every parameter that is updated.
      value: returns the value of a leaf that is a single integer, `None` if it is not known.
      same: whether leaves have the same value bit for bit; `None` if it is not known.
      leaves: arrays, or anything with their shapes and dtypes.
    """

    description: StateDescription
    names: Sequence[str]
    owners: Mapping[Names, Names]
    value: Callable[[int], int | None]
    same: Callable[[Sequence[int]], bool | None]
    leaves: Sequence[Any] = ()

    @property
    def descriptions(self) -> Sequence[LeafDescription]:
        """The descriptions of the leaves."""
        return self.description.leaves

    def find(self, leaf: LeafDescription, group: Names, number: int) -> int | None:
        """Returns the position of the corresponding leaf in a group, whatever its dimensions."""
        return self._index.get((group, leaf.transformation, number, leaf.field, leaf.parameter))

    def groups(self, *what: Any) -> Sequence[Names]:
        """Returns the groups in which a transformation, a parameter, or both, have leaves."""
        return list(self._groups.get(what, ()))

    def alike(self, group: Names, name: str) -> Sequence[TransformationDescription]:
        """Returns the transformations of one name in a group, by number."""
        return self._alike.get((group, name), ())

    def made(self, which: Made) -> TransformationDescription:
        """Returns a transformation; only its name if it is not described."""
        known = self._made.get(which)
        return TransformationDescription(which[1], which[2], which[0]) if known is None else known

    def line(self, group: Names) -> Sequence[TransformationDescription]:
        """Returns the transformations that act on the parameters of a group, in order."""
        made = self.description.transformations
        return [one for one in made if one.group == group[: len(one.group)]]

    def before(self, which: Made) -> Sequence[TransformationDescription]:
        """Returns the transformations before one, in enclosing and nested groups too."""
        found: list[TransformationDescription] = []
        for made in self.description.transformations:
            if (made.group, made.name, made.number) == which:
                return found
            shared = min(len(made.group), len(which[0]))
            if made.group[:shared] == which[0][:shared]:
                found.append(made)
        return []

    def leaves_of(self, which: Made) -> Sequence[int]:
        """Returns the positions of a transformation's leaves."""
        return self._by_made.get(which, ())

    def followed(self, which: Made) -> Sequence[Names]:
        """Returns the parameters that leaves of a transformation follow."""
        params = (self.descriptions[i].parameter for i in self.leaves_of(which))
        return list(dict.fromkeys(param for param in params if param is not None))

    @functools.cached_property
    def _index(self) -> Mapping[Any, int]:
        return {
            (leaf.group, leaf.transformation, leaf.number, leaf.field, leaf.parameter): i
            for i, leaf in enumerate(self.descriptions)
        }

    @functools.cached_property
    def _groups(self) -> Mapping[Any, Mapping[Names, None]]:
        found: dict[Any, dict[Names, None]] = {}
        for leaf in self.descriptions:
            for what in (
                (leaf.transformation, leaf.parameter),
                (leaf.transformation,),
                (leaf.parameter,),
            ):
                found.setdefault(what, {})[leaf.group] = None
        return found

    @functools.cached_property
    def _alike(self) -> Mapping[Any, Sequence[TransformationDescription]]:
        found: dict[Any, list[TransformationDescription]] = {}
        for made in self.description.transformations:
            found.setdefault((made.group, made.name), []).append(made)
        return {key: sorted(made, key=lambda one: one.number) for key, made in found.items()}

    @functools.cached_property
    def _made(self) -> Mapping[Made, TransformationDescription]:
        return {(m.group, m.name, m.number): m for m in self.description.transformations}

    @functools.cached_property
    def _by_made(self) -> Mapping[Made, Sequence[int]]:
        found: dict[Made, list[int]] = {}
        for i, leaf in enumerate(self.descriptions):
            found.setdefault(made_of(leaf), []).append(i)
        return found


def made_of(leaf: LeafDescription) -> Made:
    """Returns the transformation that a leaf belongs to."""
    return leaf.group, leaf.transformation, leaf.number


def is_recorded(leaf: LeafDescription, made: TransformationDescription) -> bool:
    """Whether a leaf is a setting recorded in the state, rather than a result of training."""
    return leaf.parameter is None and leaf.role == "other" and leaf.field[-1] in made.settings


def holds_parameters(leaf: LeafDescription) -> bool:
    """Whether a leaf belongs to parameters by their order.

    It is a vector of all of them, as in `optax.flatten`, or possibly an entry of a list.
    """
    is_entry = leaf.source == "types" and leaf.role == "other" and leaf.field[-1:] != ()
    is_entry = is_entry and leaf.field[-1].isdigit()
    is_array = bool(leaf.dimensions) and leaf.role in TRAINED and leaf.role != "statistic"
    return leaf.parameter is None and (is_array or is_entry)


def counts_updates(leaf: LeafDescription, made: TransformationDescription) -> bool:
    """Whether a leaf counts the updates emitted by a window of mini-steps."""
    windows = {bearing.count for bearing in made.bearing.values() if bearing.effect == "window"}
    is_count = leaf.parameter is None and leaf.role == "count"
    return bool(windows) and is_count and leaf.field not in windows


def has_window(made: TransformationDescription) -> bool:
    """Whether it holds partial results until the end of a window or a cycle."""
    return any(bearing.effect == "window" for bearing in made.bearing.values())


def shown(made: Made) -> str:
    """Returns a transformation as text: `group/adam#2`."""
    group, name, number = made
    return "/".join([*group, name if number == 1 else f"{name}#{number}"])
