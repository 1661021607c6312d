"""How a table of groups may be written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from opt_core._groups import REST, Frozen, Group, check_pattern
from opt_core._optimizer import OptimizerDef
from opt_core.errors import GroupError
from opt_core.protocols import Transformation


def groups_of_pairs(
    given: Sequence[Any], names: Sequence[str] | None, rest: OptimizerDef | Frozen
) -> list[Group]:
    """Returns the table of `(pattern, definition)` pairs, given as they are or as one sequence."""
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
    """Raises a `GroupError` or a `TypeError` for a table that no tree could be divided by."""
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
    hint = " (wrap it: `opt_optax_bridge.OptaxWrapper(tx)`)" if is_transformation else ""
    return f"a {type(value).__name__} for a definition{hint}"
