"""Tables of groups before and after surgery."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.patterns import Except, Rest, pattern_str, positions_of
from opt_core._groups.table import FROZEN, Group
from opt_core._optimizer import OptimizerDef
from opt_core._paths import Names
from opt_core.errors import GroupError


def group_of(definition: OptimizerDef, group: str) -> Names:
    """Returns the names along `outer/inner`; a `GroupError` unless that group has a state."""
    names = tuple(group.split("/"))
    for depth, name in enumerate(names):
        known = definition.group_names if isinstance(definition, MultiOptimizer) else ()
        if not isinstance(definition, MultiOptimizer) or name not in known:
            frozen = isinstance(definition, MultiOptimizer) and any(
                g.name == name for g in definition.groups
            )
            raise GroupError(
                f"`{'/'.join(names[: depth + 1])}` "
                + ("is frozen and has no state to reset" if frozen else "is not a group")
                + f"; the groups with a state are {_listed(known)}"
            )
        definition = definition.sub_optimizers[known.index(name)]
    return names


def as_groups(definition: OptimizerDef) -> MultiOptimizer:
    """Returns a definition with groups; one without becomes the group `'rest'`."""
    if isinstance(definition, MultiOptimizer):
        return definition
    return MultiOptimizer.from_rules([], rest=definition)


def matching_leaves(definition: MultiOptimizer, target: Any, pattern: Any) -> frozenset[int]:
    """Returns the positions of the leaves that a pattern matches: a `GroupError` if none."""
    if isinstance(pattern, Rest):
        raise GroupError("`REST` says nothing alone; give a pattern")
    found = positions_of(pattern, target, definition.param_axes)
    if not found:
        raise GroupError(
            f"{Group('pattern', pattern, FROZEN)} matches no parameter{_hint(definition, pattern)}"
        )
    return found


def _hint(definition: MultiOptimizer, pattern: Any) -> str:
    advice = ". A pattern matches whole paths of parameters, such as 'encoder/.*', not groups"
    known = [group for group in definition.groups if not isinstance(group.pattern, Rest)]
    same = next((group for group in known if group.name == pattern), None)
    if same is not None:
        return f"{advice}. For that group give its pattern, {pattern_str(same.pattern)}"
    names = _listed(group.name for group in known)
    return f"{advice}. The groups are {names}" if known else advice


def check_inner_groups(definition: MultiOptimizer, target: Any) -> None:
    """Raises a `GroupError` if a group inside a transformation has lost all its parameters.

    The table of a nested `MultiOptimizer` can be carved. That of one in a chain cannot: functions
    have captured it.
    """
    definition.select(target)
    try:
        jax.eval_shape(definition.create, target)
    except GroupError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("  ")]
        if not lines:
            raise
        raise GroupError(
            "all parameters of a group inside a transformation would leave it, and such a "
            "group cannot be removed:\n"
            + "\n".join(lines)
            + "\nWrite the new definition, with `FROZEN` or another definition for these "
            "parameters, and call `regroup(..., allow={'drop', 'optimizer'})`."
        ) from error


def carved(
    definition: MultiOptimizer, target: Any, pattern: Any, chosen: frozenset[int]
) -> list[Group]:
    """Returns the table without the chosen leaves; empty groups other than the rest are removed."""
    members = definition.select(target).members
    groups = []
    for group in definition.groups:
        taken = chosen.intersection(members[group.name])
        if not taken or isinstance(group.pattern, Rest):
            groups.append(_carve_inside(group, definition, target, taken))
        elif len(taken) < len(members[group.name]):
            inside = _carve_inside(group, definition, target, taken)
            groups.append(dataclasses.replace(inside, pattern=Except(group.pattern, pattern)))
    return groups


def _carve_inside(
    group: Group, definition: MultiOptimizer, target: Any, taken: frozenset[int]
) -> Group:
    """The group; a nested definition loses the groups without leaves."""
    nested = group.definition
    if not isinstance(nested, MultiOptimizer) or not taken:
        return group
    outer = definition.select(target)
    part = outer.cut(group.name, target)
    own = frozenset(outer.members[group.name].index(i) for i in taken)
    kept = []
    for inner in nested.groups:
        members = frozenset(nested.select(part).members[inner.name])
        if members - own or isinstance(inner.pattern, Rest):
            kept.append(_carve_inside(inner, nested, part, members & own))
    return dataclasses.replace(group, definition=nested.with_groups(kept))


def shown(definition: MultiOptimizer, names: Names) -> str:
    """Returns a group as text; one of a nested definition only by its names."""
    if len(names) > 1:
        return f"`{'/'.join(names)}`"
    name = names[0] if names else "rest"
    return str(next(group for group in definition.groups if group.name == name))


def unused(name: str, groups: Sequence[Group]) -> str:
    """Returns an unused name for a group: this one, or this one with a number."""
    names = {group.name for group in groups}
    candidates = (name if n == 1 else f"{name}_{n}" for n in range(1, len(names) + 2))
    return next(candidate for candidate in candidates if candidate not in names)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
