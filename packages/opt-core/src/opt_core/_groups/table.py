"""The table of groups, which assigns a definition to each leaf of a tree."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Sequence
from typing import Any

from opt_core._groups.patterns import (
    REST,
    Leaf,
    LogicalAxes,
    Rest,
    Traversal,
    check_pattern,
    matched,
    pattern_str,
)
from opt_core._optimizer import OptimizerDef
from opt_core.errors import GroupError
from opt_core.protocols import Transformation

_LISTED = 50
_ADVICE = (
    "A pattern must match the whole path of a leaf. Every leaf needs exactly one group: make the "
    "patterns disjoint, or say `rest=FROZEN` or `rest=` a definition."
)


class Frozen(enum.Enum):
    """The type of `FROZEN`."""

    FROZEN = "frozen"

    def __repr__(self) -> str:
        return "FROZEN"


FROZEN = Frozen.FROZEN
"""In place of a definition: these leaves have no state and are not updated."""


@dataclasses.dataclass(frozen=True)
class Group:
    """One row of the table of groups.

    Attributes:
      name: of the group in overrides, reports and state dicts.
      pattern: selects its leaves.
      definition: how they are updated, or `FROZEN`.
    """

    name: str
    pattern: Any
    definition: OptimizerDef | Frozen

    @property
    def is_frozen(self) -> bool:
        """Whether the group is not updated."""
        return isinstance(self.definition, Frozen)

    def __str__(self) -> str:
        return f"`{self.name}` ({pattern_str(self.pattern)})"


def assign(
    groups: Sequence[Group],
    tree: Any,
    leaves: Sequence[Leaf],
    axes: LogicalAxes | None,
    *,
    allow_unused: bool = False,
) -> list[int]:
    """Returns the position of the group of every leaf.

    Args:
      groups: the table; at most one pattern is `REST`.
      tree: the parameters' containers with `leaves[i].info` as leaves.
      leaves: the same leaves, in order.
      axes: logical axes by path, if known.
      allow_unused: whether a traversal may match nothing, as in Flax and T5X. Any other pattern is
        written for this package, and a typo in it must be reported.

    Raises:
      GroupError: a leaf is matched twice or never, or a pattern matches nothing; lists them all.
    """
    found = [
        frozenset[int]() if isinstance(g.pattern, Rest) else matched(g.pattern, tree, leaves, axes)
        for g in groups
    ]
    rest = next((i for i, g in enumerate(groups) if isinstance(g.pattern, Rest)), None)
    owners: list[int] = []
    problems: list[str] = []
    for position, leaf in enumerate(leaves):
        own = [i for i, matches in enumerate(found) if position in matches]
        if not own and rest is not None:
            own = [rest]
        if len(own) != 1:
            names = " and ".join(str(groups[i]) for i in own)
            problems.append(f"`{leaf.path}` is matched by " + (names or "no group"))
        owners.append(own[0] if own else -1)
    for group, matches in zip(groups, found, strict=True):
        may_be_unused = allow_unused and isinstance(group.pattern, Traversal)
        if not matches and not may_be_unused and not isinstance(group.pattern, Rest):
            problems.append(f"{group} matches no parameter" + _hint(group.pattern, leaves))
    if problems:
        raise GroupError(_message(problems))
    return owners


def _hint(pattern: Any, leaves: Sequence[Leaf]) -> str:
    if not isinstance(pattern, str | re.Pattern):
        return ""
    found = sum(1 for leaf in leaves if re.search(pattern, leaf.path))
    return f"; a part of the path matches for {found}: write '.*' around it" if found else ""


def _message(problems: Sequence[str]) -> str:
    listed = [f"  {line}" for line in problems[:_LISTED]]
    if len(problems) > _LISTED:
        listed.append(f"  ... and {len(problems) - _LISTED} more")
    return "\n".join(
        [
            "the groups do not divide the parameters:",
            *listed,
            _ADVICE,
        ]
    )


# How a table may be written.


def groups_of_pairs(
    given: Sequence[Any], names: Sequence[str] | None, rest: OptimizerDef | Frozen
) -> list[Group]:
    """Returns the table of `(pattern, definition)` pairs, given as varargs or as one sequence."""
    pairs = _pairs(given)
    names = [str(i) for i in range(len(pairs))] if names is None else list(names)
    if len(names) != len(pairs):
        raise GroupError(f"`names` has {len(names)} names for {len(pairs)} groups; give one each")
    rows = [Group(name, *pair) for name, pair in zip(names, pairs, strict=True)]
    return [*rows, Group("rest", REST, rest)]


def groups_of_rules(rules: Sequence[Any], rest: OptimizerDef | Frozen | None) -> list[Group]:
    """Returns the table of `(pattern, definition)` or `(name, pattern, definition)` rows."""
    groups = []
    for position, row in enumerate(rules):
        if not isinstance(row, tuple | list) or len(row) not in (2, 3):
            raise TypeError(
                f"rule {position} must be `(pattern, definition)` or `(name, pattern, definition)`"
            )
        groups.append(Group(*row) if len(row) == 3 else Group(str(position), *row))
    return groups if rest is None else [*groups, Group("rest", REST, rest)]


def check_groups(groups: Sequence[Group]) -> None:
    """Raises a `GroupError` or a `TypeError` for a table that is invalid for every tree."""
    if not groups:
        raise GroupError("there is no group: pass `(pattern, definition)` pairs")
    names = [group.name for group in groups]
    for name in names:
        _check_name(name)
        if names.count(name) > 1:
            raise GroupError(f"two groups are called `{name}`; rename one")
    for group in groups:
        check_pattern(group.pattern)
        _check_definition(group, group.definition)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        raise GroupError(f"a group's name is text without `/`; got {name!r}")


def _check_definition(group: Group, definition: Any) -> None:
    if not isinstance(definition, OptimizerDef | Frozen):
        raise TypeError(f"group {group} has {_no_definition(definition)}")


def _pairs(given: Sequence[Any]) -> list[tuple[Any, Any]]:
    if len(given) == 1 and isinstance(given[0], Iterable) and not _looks_like_pair(given[0]):
        given = list(given[0])
    for pair in given:
        if not _has_two(pair):
            raise TypeError(
                f"a group is a pair `(pattern, definition)`; got a {type(pair).__name__}"
            )
        if not _is_pair(pair):
            raise TypeError(
                f"a group is a pair `(pattern, definition)`; got {_no_definition(pair[1])}"
            )
    if not given:
        raise GroupError("there is no group: pass `(pattern, definition)` pairs")
    return [(pattern, definition) for pattern, definition in given]


def _looks_like_pair(value: Any) -> bool:
    return _has_two(value) and (_is_pair(value) or not _has_two(value[0]))


def _has_two(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2


def _is_pair(pair: Any) -> bool:
    return _has_two(pair) and isinstance(pair[1], OptimizerDef | Frozen)


def _no_definition(value: Any) -> str:
    is_transformation = isinstance(value, Transformation)
    hint = (
        " (wrap it: `opt_optax_bridge.OptaxWrapper(tx)`; or write `opt_optax_bridge.adamw(...)` "
        "for `optax.adamw(...)`, `opt_optax_bridge.chain(...)` for `optax.chain(...)`)"
    )
    return f"a {type(value).__name__} for a definition{hint * is_transformation}"
