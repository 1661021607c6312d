"""Logical axes reach the definitions of groups before there are any parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from opt_core._groups.patterns import Leaf, LogicalAxes, Rest, described, matched
from opt_core._groups.table import Group
from opt_core._paths import Names, flatten_with_paths
from opt_core.errors import GroupError

_NO_ARRAY: Any = object()


def with_axes(groups: Sequence[Group], param_axes: Any, known: LogicalAxes) -> list[Group]:
    """Returns the table with copies of definitions that take axes, which now know them.

    A group whose pattern reads the shape of leaves gets the axes of all leaves that it may have:
    those that paths and axes assign to no other group.
    """
    axes = dict(flatten_with_paths(param_axes))
    tree = jax.tree.map(lambda _: _NO_ARRAY, param_axes, is_leaf=lambda x: x is None)
    leaves, treedef = described(tree)
    decided = [_decided(group, treedef, leaves, known) for group in groups]
    taken = frozenset[int]().union(*(members for members in decided if members is not None))
    free = frozenset(range(len(leaves))) - taken
    told = []
    for group, members in zip(groups, decided, strict=True):
        # No method with a default: T5X's trainer asks `hasattr`, and then the model must have axes.
        if hasattr(group.definition, "set_param_axes"):
            names = [leaves[i].names for i in sorted(free if members is None else members)]
            definition = copy.copy(group.definition)
            definition.set_param_axes(_nested(names, axes))
            group = dataclasses.replace(group, definition=definition)
        told.append(group)
    return told


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
