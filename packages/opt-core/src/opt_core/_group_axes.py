"""Logical axes of parameters and states, group by group."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from opt_core._group_states import GroupStates, merge_states
from opt_core._groups import Group, Names
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import children, path_str
from opt_core._roles import roles
from opt_core._selection import Selection
from opt_core.errors import TreeMismatchError
from opt_core.protocols import DerivesLogicalAxes, TakesParamAxes

_ABSENT: Any = object()


def axes_of_leaves(selection: Selection, params: Any, param_axes: Any) -> list[Any]:
    """Returns the axes of every leaf of `params`, in order.

    Args:
      selection: how `params` are divided.
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


def with_axes(selection: Selection, param_axes: Any) -> list[Group]:
    """Returns the table, with copies of the definitions that take axes and know them now."""
    groups = []
    for position, part in enumerate(selection.parts):
        definition = part.group.definition
        if isinstance(definition, TakesParamAxes):
            definition = copy.copy(definition)
            definition.set_param_axes(selection.cut_by_path(param_axes, position))
        groups.append(dataclasses.replace(part.group, definition=definition))
    return groups


def derive_axes(
    selection: Selection, optimizer: Optimizer, subs: Sequence[Optimizer], param_axes: Any
) -> tuple[Any, Any]:
    """Returns the axes of parameters and `param_states`, in their own containers.

    Args:
      selection: how the parameters are divided.
      optimizer: the whole.
      subs: every group that is not frozen, as its definition sees it.
      param_axes: see `axes_of_leaves`.
    """
    axes = axes_of_leaves(selection, optimizer.target, param_axes)
    states = [
        _derive_group_axes(sub, part.cut(axes)).param_states
        for sub, part in zip(subs, selection.trained, strict=True)
    ]
    target = selection.treedef.unflatten(axes)
    if isinstance(like := optimizer.state.param_states, GroupStates):
        return target, GroupStates(dict(zip(like, states, strict=True)))
    return target, merge_states(selection, states)


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
    for role, leaf in zip(roles(optimizer.target, states), leaves, strict=True):
        mirrors = role.param is not None and np.shape(params[role.param]) == np.shape(leaf)
        derived.append(axes[role.param] if mirrors and role.param is not None else None)
    return OptimizerState(None, jax.tree.unflatten(jax.tree.structure(states), derived))


def _by_path(params: Any, tree: Any, names: Names = ()) -> Iterator[tuple[Names, Any]]:
    """What `tree` has at the paths of the leaves of `params`."""
    opened = children(params)
    if opened is None:
        if params is not None:
            yield names, tree
        return
    theirs = dict(children(tree).children)  # type: ignore[union-attr]
    for name, child in opened.children:
        yield from _by_path(child, theirs[name], (*names, name))
