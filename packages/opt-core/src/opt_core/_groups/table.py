"""The table of groups: how it is written, how it divides a tree, and who knows logical axes."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from opt_core._groups.division import Division
from opt_core._groups.patterns import (
    REST,
    Leaf,
    LogicalAxes,
    Rest,
    check_pattern,
    described,
    matched,
    pattern_str,
)
from opt_core._optimizer import OptimizerDef
from opt_core._paths import Names, flatten_with_paths
from opt_core.errors import GroupError
from opt_core.protocols import Transformation

_LISTED = 50
_NO_ARRAY: Any = object()
_ADVICE = (
    "A pattern must match the whole path of a leaf. Every leaf needs exactly one group: make the "
    "patterns disjoint, or say `rest=FROZEN` or `rest=` a definition."
)

Pair: TypeAlias = tuple[Any, OptimizerDef]
Rule: TypeAlias = Pair | tuple[str, Any, OptimizerDef]


class Frozen(OptimizerDef):
    """The type of `FROZEN`."""

    def __repr__(self) -> str:
        return "FROZEN"


FROZEN = Frozen(None)
"""The definition of leaves that have no state and are not updated."""


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
    definition: OptimizerDef

    @property
    def is_frozen(self) -> bool:
        """Whether the group is not updated."""
        return isinstance(self.definition, Frozen)

    def __str__(self) -> str:
        return f"`{self.name}` ({pattern_str(self.pattern)})"


def divide(
    groups: Sequence[Group],
    tree: Any,
    axes: LogicalAxes | None,
    *,
    may_be_empty: Callable[[Group], bool],
) -> Division:
    """Returns how the patterns of a table divide the parameters; lists all that is wrong."""
    leaves, treedef = described(tree)
    matches = [
        frozenset[int]()
        if isinstance(group.pattern, Rest)
        else matched(group.pattern, treedef, leaves, axes)
        for group in groups
    ]
    rest = [i for i, group in enumerate(groups) if isinstance(group.pattern, Rest)]
    owners: list[int] = []
    problems: list[str] = []
    for position, leaf in enumerate(leaves):
        claims = [i for i, match in enumerate(matches) if position in match] or rest
        if len(claims) != 1:
            names = " and ".join(str(groups[i]) for i in claims)
            problems.append(f"`{leaf.path}` is matched by " + (names or "no group"))
        owners.append(claims[0] if claims else -1)
    for group, match in zip(groups, matches, strict=True):
        if not match and not may_be_empty(group):
            problems.append(f"{group} matches no parameter" + _hint(group.pattern, leaves))
    if problems:
        raise GroupError(_message(problems))
    trained = tuple(group.name for group in groups if not group.is_frozen)
    return Division(tuple(group.name for group in groups), trained, tuple(owners), treedef)


def _hint(pattern: Any, leaves: Sequence[Leaf]) -> str:
    if not isinstance(pattern, str | re.Pattern):
        return ""
    count = sum(1 for leaf in leaves if re.search(pattern, leaf.path))
    return f"; a part of the path matches for {count}: write '.*' around it" if count else ""


def _message(problems: Sequence[str]) -> str:
    lines = [f"  {line}" for line in problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"  ... and {len(problems) - _LISTED} more")
    return "\n".join(["the groups do not divide the parameters:", *lines, _ADVICE])


def groups_of_pairs(
    pairs: Sequence[Any], names: Sequence[str] | None, rest: OptimizerDef
) -> list[Group]:
    """Returns the table of `(pattern, definition)` pairs, given as varargs or as one sequence."""
    if len(pairs) == 1 and isinstance(pairs[0], Iterable) and not _is_pair(pairs[0]):
        pairs = list(pairs[0])
    if not pairs:
        raise GroupError("there is no group: pass `(pattern, definition)` pairs")
    for pair in pairs:
        if not _has_two(pair):
            raise TypeError(
                f"a group is a pair `(pattern, definition)`; got a {type(pair).__name__}"
            )
        if not isinstance(pair[1], OptimizerDef):
            raise TypeError(
                f"a group is a pair `(pattern, definition)`; got {_no_definition(pair[1])}"
            )
    names = [str(i) for i in range(len(pairs))] if names is None else list(names)
    if len(names) != len(pairs):
        raise GroupError(f"`names` has {len(names)} names for {len(pairs)} groups; give one each")
    rows = [Group(name, *pair) for name, pair in zip(names, pairs, strict=True)]
    return [*rows, Group("rest", REST, rest)]


def _is_pair(value: Any) -> bool:
    """Whether it is a pair, right or wrong, and not a sequence of pairs."""
    is_definition = _has_two(value) and isinstance(value[1], OptimizerDef)
    return is_definition or (_has_two(value) and not _has_two(value[0]))


def _has_two(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2


def groups_of_rules(rules: Iterable[Any], rest: OptimizerDef | None) -> list[Group]:
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
    names: list[Any] = [group.name for group in groups]
    for name, group in zip(names, groups, strict=True):
        if not isinstance(name, str) or not name or "/" in name:
            raise GroupError(f"a group's name is text without `/`; got {name!r}")
        if names.count(name) > 1:
            raise GroupError(f"two groups are called `{group.name}`; rename one")
        check_pattern(group.pattern)
        if not isinstance(group.definition, OptimizerDef):
            raise TypeError(f"group {group} has {_no_definition(group.definition)}")


def _no_definition(value: Any) -> str:
    is_transformation = isinstance(value, Transformation)
    hint = (
        " (wrap it: `opt_optax_bridge.OptaxWrapper(tx)`; or write `opt_optax_bridge.adamw(...)` "
        "for `optax.adamw(...)`, `opt_optax_bridge.chain(...)` for `optax.chain(...)`)"
    )
    return f"a {type(value).__name__} for a definition{hint * is_transformation}"


def with_axes(groups: Sequence[Group], param_axes: Any, known: LogicalAxes) -> list[Group]:
    """Returns the table with copies of definitions that take axes, which now know them."""
    # A group whose pattern reads the shape of leaves gets the axes of all leaves that it may have:
    # those that paths and axes assign to no other group.
    axes = dict(flatten_with_paths(param_axes))
    tree = jax.tree.map(lambda _: _NO_ARRAY, param_axes, is_leaf=lambda x: x is None)
    leaves, treedef = described(tree)
    decided = [_decided(group, treedef, leaves, known) for group in groups]
    taken = frozenset[int]().union(*(members for members in decided if members is not None))
    free = frozenset(range(len(leaves))) - taken
    informed = []
    for group, members in zip(groups, decided, strict=True):
        # No method with a default: T5X's trainer asks `hasattr`, and then the model must have axes.
        if hasattr(group.definition, "set_param_axes"):
            names = [leaves[i].names for i in sorted(free if members is None else members)]
            definition = copy.copy(group.definition)
            definition.set_param_axes(_nested(names, axes))
            group = dataclasses.replace(group, definition=definition)
        informed.append(group)
    return informed


def _decided(
    group: Group, treedef: Any, leaves: Sequence[Leaf], known: LogicalAxes
) -> frozenset[int] | None:
    """The matches of a pattern; `None` if paths and axes do not determine them."""
    if isinstance(group.pattern, Rest):
        return None
    try:
        return matched(group.pattern, treedef, leaves, known)
    except GroupError:
        return None


def _nested(paths: Iterable[Names], axes: Mapping[Names, Any]) -> Any:
    """Nested dicts, whatever the containers of the parameters."""
    root: dict[str, Any] = {}
    for names in paths:
        if not names:
            return axes[names]
        node = root
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = axes[names]
    return root
