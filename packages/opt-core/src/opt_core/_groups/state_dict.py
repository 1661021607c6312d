"""Writing and restoring groups, each by its own definition.

If every group keeps an entry per parameter, a state dict is the merged tree of Flax and T5X: the
entries at the paths of the parameters, `None` for frozen ones. Otherwise it has an entry per group,
by name. In memory states are always by group (`GroupStates`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from opt_core._groups import layout
from opt_core._groups.selection import Selection, at_paths, has_shape, replace_at
from opt_core._groups.states import GroupStates, split_states
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._paths import Names, path_str
from opt_core._report import Mismatch, RestoreReport
from opt_core._state_dict import to_state_dict
from opt_core.errors import RestoreError, StateDictError

_ABSENT: Any = object()

Restored = tuple[tuple[Any, OptimizerState], RestoreReport]
Restore = Callable[[Any, OptimizerState, Mapping[str, Any]], Restored]


@dataclasses.dataclass(frozen=True)
class GroupOptimizer:
    """One group of an optimizer.

    Attributes:
      name: the group's.
      paths: of its leaves.
      structure: of its parameters.
      optimizer: what its definition sees.
    """

    name: str
    paths: tuple[Names, ...]
    structure: Any
    optimizer: Optimizer


def group_optimizers(
    selection: Selection,
    definitions: Sequence[OptimizerDef],
    target: Any,
    state: OptimizerState,
) -> Iterator[GroupOptimizer]:
    """Yields every group that is not frozen, by path; leaves may be axes or anything else."""
    leaves = jax.tree.leaves(target)
    params = leaves if all(map(has_shape, leaves)) else None
    states = split_states(selection, definitions, params, state.param_states)
    for part, definition, own in zip(selection.trained, definitions, states, strict=True):
        position = selection.parts.index(part)
        cut = selection.cut_by_path(target, position, keep_keys=definition.whole_tree)
        optimizer = Optimizer(definition, OptimizerState(state.step, own), cut)
        paths = tuple(selection.paths[i] for i in part.members)
        yield GroupOptimizer(part.group.name, paths, part.treedef, optimizer)


def is_merged(given: Iterable[GroupOptimizer]) -> bool:
    """Whether the state dict is one tree of all groups: each has an entry per parameter."""
    return all(
        group.optimizer.optimizer_def._has_entries(
            group.structure, group.optimizer.target, group.optimizer.state
        )
        for group in given
    )


def write_states(target: Any, given: Sequence[GroupOptimizer]) -> dict[str, Any]:
    """Returns the entry `param_states` of a state dict in a separate dict, if there is one."""
    is_grouped = not is_merged(given)
    written: Any = {} if is_grouped else layout.blank(target)
    for group in given:
        optimizer = group.optimizer
        state_dict = optimizer.optimizer_def.state_dict(optimizer.target, optimizer.state)
        entry = state_dict["state"].get("param_states", {})
        if is_grouped:
            written |= {group.name: entry} if not isinstance(entry, Mapping) or entry else {}
            continue
        _check_entries(group, entry)
        for names in group.paths:
            value = layout.get_at(entry, names, {})
            if names:
                layout.set_at(written, names, value)
            else:  # the only parameter is the tree itself
                written = value
    return {} if is_grouped and not written else {"param_states": written}


def _check_entries(group: GroupOptimizer, entry: Any) -> None:
    """Raises a `StateDictError` unless the group wrote exactly one entry per parameter."""
    states = dict(at_paths(group.optimizer.state.param_states, group.paths))
    missing = [
        f"`{path_str(names)}` has no entry"
        for names in group.paths
        if layout.get_at(entry, names, _ABSENT) is _ABSENT and jax.tree.leaves(states.get(names))
    ]
    others = jax.tree.leaves(layout.leftover(entry, layout.trie(group.paths)))
    if not missing and not others:
        return
    problems = missing + [f"{len(others)} arrays do not belong to a parameter"] * bool(others)
    raise StateDictError(
        f"the `state_dict` of group `{group.name}` is not laid out as its parameters are, as its "
        "state is:\n"
        + "\n".join(f"  {line}" for line in problems)
        + f"\nWrite one entry per parameter, or set `whole_tree = True` in "
        f"`{type(group.optimizer.optimizer_def).__name__}`: its state then has a layout of its own."
    )


def match_groups(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    given: Sequence[GroupOptimizer],
    match_rest: Restore,
) -> Restored:
    """Returns an optimizer's parameters and state with the leaves of a state dict, and a report.

    Args:
      optimizer: the reference.
      state_dict: has mappings `target` and `state`.
      given: the groups of `optimizer`.
      match_rest: restores what does not belong to a group: the step and frozen leaves.
    """
    target, state = optimizer.target, optimizer.state
    is_grouped = not is_merged(given)
    entry = state_dict["state"].get("param_states", {})
    paths = [names for group in given for names in group.paths]
    shape = layout.trie(paths)
    masked = dict.fromkeys(paths, ())
    rest_states = {} if is_grouped else replace_at(jax.tree.map(lambda _: None, target), masked)
    rest_shape = dict.fromkeys(group.name for group in given) if is_grouped else shape
    rest_dict = {
        "target": layout.leftover(state_dict["target"], shape),
        "state": {
            **state_dict["state"],
            "param_states": layout.leftover(entry, rest_shape),
        },
    }
    (rest, rest_state), report = match_rest(
        replace_at(target, masked), OptimizerState(state.step, rest_states), rest_dict
    )
    reports = [dataclasses.replace(report, state_matched=0)]
    leaves: dict[Names, Any] = {}
    states: dict[str, Any] = {}
    for group in given:
        written = _own_dict(state_dict, group, is_grouped)
        (new, new_state), found = _restore(group.optimizer, written)
        found = layout.without_step(found)
        leaves |= dict(at_paths(new, group.paths))
        states[group.name] = new_state.param_states
        reports.append(layout.renamed(found, group.name) if is_grouped else found)
    restored = replace_at(rest, leaves), OptimizerState(rest_state.step, GroupStates(states))
    return restored, layout.merged_reports(reports)


def read_list_layout(
    state_dict: Any, given: Sequence[GroupOptimizer]
) -> tuple[Any, tuple[Mismatch, ...]]:
    """Returns a state dict in today's layout, and the entries of an old one that do not fit it."""
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not layout.is_list_layout(state) or not is_merged(given):
        return state_dict, ()
    state, problems = layout.from_list_layout(state, [group.paths for group in given])
    return {**state_dict, "state": state}, problems


def _own_dict(
    state_dict: Mapping[str, Any], group: GroupOptimizer, is_grouped: bool
) -> dict[str, Any]:
    """The part of a state dict that one group restores."""
    shape = layout.trie(group.paths)
    state: dict[str, Any] = {"step": group.optimizer.state.step}
    if "param_states" in state_dict["state"]:
        entry = state_dict["state"]["param_states"]
        if not is_grouped:
            state["param_states"] = layout.restrict(entry, shape) if group.paths else {}
        elif isinstance(entry, Mapping) and group.name in entry:
            state["param_states"] = entry[group.name]
    target = layout.restrict(state_dict["target"], shape) if group.paths else {}
    return {"target": target, "state": state}


def _restore(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Restored:
    """By the definition's own `restore_state`, if it has one."""
    definition, target, state = optimizer.optimizer_def, optimizer.target, optimizer.state
    if type(definition).restore_state is OptimizerDef.restore_state:
        return definition._match(target, state, state_dict)
    try:
        restored = definition.restore_state(target, state, state_dict)
    except RestoreError as error:
        return (target, state), error.report
    states = len(jax.tree.leaves(restored[1].param_states))
    return restored, RestoreReport((), len(jax.tree.leaves(restored)), states)


def target_dict(target: Any, step: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict in the layout of Flax and T5X."""
    return {"target": to_state_dict(target), "state": {"step": to_state_dict(step), **states}}


def is_whole(state_dict: Any) -> bool:
    """Whether it has parameters and a state; otherwise the whole is one deviation."""
    if not isinstance(state_dict, Mapping) or "target" not in state_dict:
        return False
    return isinstance(state_dict.get("state"), Mapping)
