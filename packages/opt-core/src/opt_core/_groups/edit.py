"""Changing a table of groups: taking leaves out of theirs, for a group of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from opt_core._groups.leaf_groups import members
from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.patterns import Except, Rest, pattern_str, positions_of
from opt_core._groups.table import FROZEN, Group
from opt_core._optimizer import Optimizer, OptimizerDef
from opt_core._paths import Names, path_str
from opt_core.errors import GroupError


def with_group(optimizer: Optimizer, group: Group) -> MultiOptimizer:
    """Returns the definition with a group before the others, which have its leaves no longer.

    Args:
      optimizer: one without groups becomes the group `'rest'`.
      group: the new one; a number is appended to its name if that is taken.

    Raises:
      GroupError: its pattern matches nothing; or, if it is not frozen, leaves that are not either.
    """
    definition, target, pattern = optimizer.optimizer_def, optimizer.target, group.pattern
    if not isinstance(definition, MultiOptimizer):
        definition = MultiOptimizer.from_rules([], rest=definition)
    chosen = _matching_leaves(definition, target, pattern)
    if not group.is_frozen:
        _check_frozen(optimizer, definition, chosen)
    groups = _carved(definition, target, pattern, chosen)
    names = {group.name for group in groups}
    numbers = (group.name, *(f"{group.name}_{n}" for n in range(2, len(names) + 2)))
    name = next(name for name in numbers if name not in names)
    return definition.with_groups([dataclasses.replace(group, name=name), *groups])


def _matching_leaves(definition: MultiOptimizer, target: Any, pattern: Any) -> frozenset[int]:
    """The positions of the leaves that a pattern matches: a `GroupError` if none."""
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


def _check_frozen(optimizer: Optimizer, definition: MultiOptimizer, chosen: frozenset[int]) -> None:
    paths = definition.select(optimizer.target).paths
    owners = {names: group for group, names in members(optimizer)}
    if busy := [
        f"  `{path_str(paths[i])}` belongs to {_shown(definition, owners[paths[i]])}"
        for i in sorted(chosen)
        if paths[i] in owners
    ]:
        raise GroupError(
            "`pattern` matches leaves that are not frozen:\n"
            + "\n".join(busy)
            + "\nMake it narrower, or take `regroup` to move them."
        )


def _shown(definition: MultiOptimizer, names: Names) -> str:
    """A group as text; one of a nested definition only by its names."""
    if len(names) > 1:
        return f"`{'/'.join(names)}`"
    name = names[0] if names else "rest"
    return str(next(group for group in definition.groups if group.name == name))


def _carved(
    definition: MultiOptimizer, target: Any, pattern: Any, chosen: frozenset[int]
) -> list[Group]:
    """The table without the chosen leaves; empty groups other than the rest are removed."""
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


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
