"""Logical axes of parameters and states, group by group."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from opt_core._description.follow import follow
from opt_core._groups.layout import set_at
from opt_core._groups.patterns import Leaf, LogicalAxes, Rest, matched
from opt_core._groups.selection import Selection, described
from opt_core._groups.states import join_states
from opt_core._groups.table import Group
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import Names, children, flatten_with_paths, path_str
from opt_core.errors import GroupError, TreeMismatchError
from opt_core.protocols import DerivesLogicalAxes, TakesParamAxes

_ABSENT: Any = object()


def axes_of_leaves(selection: Selection, params: Any, param_axes: Any) -> list[Any]:
    """Returns the axes of every leaf of `params`, in order.

    Args:
      selection: the groups of `params`.
      params: the parameters.
      param_axes: the same paths; a `PartitionSpec` or `None` at each, containers of any kind.

    Raises:
      TreeMismatchError: a path is missing or extra; lists them all.
    """
    found: dict[Names, Any] = {}
    problems: list[str] = []

    def walk(node: Any, axes: Any, names: Names) -> None:
        if names in selection.owners:
            found[names] = axes
            if axes is _ABSENT:
                problems.append(f"{path_str(names)}: expected a `PartitionSpec`, found nothing")
            return
        opened = children(node)
        if opened is None:
            return
        given = children(axes) if axes is not _ABSENT else None
        theirs = dict(given.children) if given is not None else {}
        for name, child in opened.children:
            walk(child, theirs.pop(name, _ABSENT), (*names, name))
        for name in theirs:
            problems.append(f"{path_str((*names, name))}: expected nothing, found axes")

    walk(params, param_axes, ())
    if problems:
        raise TreeMismatchError(
            "`param_axes` do not have the paths of the parameters:\n"
            + "\n".join(f"  {line}" for line in problems)
            + "\nGive one `PartitionSpec`, or `None`, for every parameter."
        )
    return [found[names] for names in selection.paths]


def with_axes(groups: Sequence[Group], param_axes: Any, known: LogicalAxes) -> list[Group]:
    """Returns the table with copies of definitions that take axes, which now know them.

    Only the axes need to be known, not the parameters. A group whose pattern reads the shape of
    leaves gets the axes of all leaves that it may have: those that paths assign to no other group.

    Args:
      groups: the table.
      param_axes: a tree like the parameters with a `PartitionSpec`, or `None`, per leaf.
      known: the names in them by path.
    """
    if not any(isinstance(group.definition, TakesParamAxes) for group in groups):
        return list(groups)
    axes = dict(flatten_with_paths(param_axes))
    tree = jax.tree.map(lambda _: _ABSENT, param_axes, is_leaf=lambda x: x is None)
    leaves, treedef = described(tree)
    infos = treedef.unflatten([leaf.info for leaf in leaves])
    decided = [_decided(group.pattern, infos, leaves, known) for group in groups]
    free = frozenset(range(len(leaves))).difference(*(own for own in decided if own is not None))
    return [
        _told(
            group,
            {leaves[i].names: axes[leaves[i].names] for i in sorted(free if own is None else own)},
        )
        for group, own in zip(groups, decided, strict=True)
    ]


def _decided(
    pattern: Any, tree: Any, leaves: Sequence[Leaf], known: LogicalAxes
) -> frozenset[int] | None:
    """The matches of a pattern; `None` if paths and axes do not determine them."""
    if isinstance(pattern, Rest):
        return None
    try:
        return matched(pattern, tree, leaves, known)
    except GroupError:
        return None


def _told(group: Group, axes: Mapping[Names, Any]) -> Group:
    if not isinstance(group.definition, TakesParamAxes):
        return group
    # Nested dicts, whatever the containers of the parameters: they need no placeholders.
    tree: Any = axes.get((), {})
    for names, spec in axes.items():
        if names:
            set_at(tree, names, spec)
    definition = copy.copy(group.definition)
    definition.set_param_axes(tree)
    return dataclasses.replace(group, definition=definition)


def derive_axes(
    selection: Selection, optimizer: Optimizer, subs: Sequence[Optimizer], param_axes: Any
) -> tuple[Any, Any]:
    """Returns the axes of parameters and `param_states`, in their own containers.

    Args:
      selection: the groups of the parameters.
      optimizer: the whole.
      subs: every group that is not frozen, as its definition sees it.
      param_axes: see `axes_of_leaves`.
    """
    axes = axes_of_leaves(selection, optimizer.target, param_axes)
    states = [
        _derive_group_axes(sub, part.cut(axes)).param_states
        for sub, part in zip(subs, selection.trained, strict=True)
    ]
    return selection.treedef.unflatten(axes), join_states(selection, states)


def _derive_group_axes(optimizer: Optimizer, param_axes: Any) -> OptimizerState:
    """Returns the axes of one group's state.

    Args:
      optimizer: the group as its definition sees it.
      param_axes: axes in the containers of its parameters.
    """
    definition = optimizer.optimizer_def
    if isinstance(definition, DerivesLogicalAxes):
        return definition.derive_logical_axes(optimizer, param_axes).state
    states = optimizer.state.param_states
    leaves = jax.tree.leaves(states)
    params = dict(_by_path(optimizer.target, optimizer.target))
    axes = dict(_by_path(optimizer.target, param_axes))
    derived = []
    found = follow(lambda tree: definition.init_state(tree).param_states, optimizer.target, states)
    for at, leaf in zip(found, leaves, strict=True):
        mirrors = at.parameter is not None and np.shape(params[at.parameter]) == np.shape(leaf)
        derived.append(axes[at.parameter] if mirrors and at.parameter is not None else None)
    return OptimizerState(None, jax.tree.unflatten(jax.tree.structure(states), derived))


def _by_path(params: Any, tree: Any, names: Names = ()) -> Iterator[tuple[Names, Any]]:
    """The values of `tree` at the paths of the leaves of `params`."""
    opened = children(params)
    if opened is None:
        if params is not None:
            yield names, tree
        return
    theirs = dict(children(tree).children)  # type: ignore[union-attr]
    for name, child in opened.children:
        yield from _by_path(child, theirs[name], (*names, name))
