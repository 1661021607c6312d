"""Writing and restoring groups, each by its own definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from opt_core import _group_layout as layout
from opt_core._group_states import GroupStates, check_division
from opt_core._groups import Names
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._paths import path_str
from opt_core._report import Mismatch, RestoreReport
from opt_core._selection import Part, Selection, at_paths, has_shape, replace_at
from opt_core._state_dict import to_state_dict
from opt_core.errors import RestoreError, StateDictError

_ABSENT: Any = object()

Restored = tuple[tuple[Any, OptimizerState], RestoreReport]
Restore = Callable[[Any, OptimizerState, Mapping[str, Any]], Restored]


@dataclasses.dataclass(frozen=True)
class Share:
    """One group of an optimizer.

    Attributes:
      name: the group's.
      paths: of its leaves.
      optimizer: what its definition sees.
    """

    name: str
    paths: tuple[Names, ...]
    optimizer: Optimizer


def shares(
    selection: Selection,
    definitions: Sequence[OptimizerDef],
    target: Any,
    state: OptimizerState,
) -> Iterator[Share]:
    """Yields every group that is not frozen, by path: leaves may be axes, or anything."""
    states = state.param_states
    if not isinstance(states, GroupStates) and all(map(has_shape, jax.tree.leaves(target))):
        check_division(selection, definitions, target, dict(at_paths(states, selection.paths)))
    for part, definition in zip(selection.trained, definitions, strict=True):
        position = selection.parts.index(part)
        own = (
            states[part.group.name]
            if isinstance(states, GroupStates)
            else selection.cut_by_path(states, position)
        )
        cut = selection.cut_by_path(target, position, holes=definition.whole_tree)
        optimizer = Optimizer(definition, OptimizerState(state.step, own), cut)
        yield Share(part.group.name, _paths(selection, part), optimizer)


def write_states(target: Any, is_grouped: bool, given: Sequence[Share]) -> dict[str, Any]:
    """Returns the entry `param_states` of a state dict in a dict of its own, if there is one."""
    written: Any = {} if is_grouped else layout.blank(target)
    for share in given:
        optimizer = share.optimizer
        state_dict = optimizer.optimizer_def.state_dict(optimizer.target, optimizer.state)
        entry = state_dict["state"].get("param_states", {})
        if is_grouped:
            written |= {share.name: entry} if not isinstance(entry, Mapping) or entry else {}
            continue
        _check_entries(share, entry)
        for names in share.paths:
            value = layout.get_at(entry, names, {})
            if names:
                layout.set_at(written, names, value)
            else:  # the only parameter is the tree itself
                written = value
    return {} if is_grouped and not written else {"param_states": written}


def _check_entries(share: Share, entry: Any) -> None:
    """Raises a `StateDictError` unless the group wrote an entry per parameter, and no other."""
    states = dict(at_paths(share.optimizer.state.param_states, share.paths))
    missing = [
        f"`{path_str(names)}` has no entry"
        for names in share.paths
        if layout.get_at(entry, names, _ABSENT) is _ABSENT and jax.tree.leaves(states.get(names))
    ]
    others = jax.tree.leaves(layout.leftover(entry, layout.trie(share.paths)))
    if not missing and not others:
        return
    problems = missing + [f"{len(others)} arrays are of no parameter"] * bool(others)
    raise StateDictError(
        f"the `state_dict` of group `{share.name}` is not laid out as its parameters are, as its "
        "state is:\n"
        + "\n".join(f"  {line}" for line in problems)
        + f"\nWrite one entry per parameter, or set `whole_tree = True` in "
        f"`{type(share.optimizer.optimizer_def).__name__}`: its state then has a layout of its own."
    )


def match_groups(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    given: Sequence[Share],
    match_rest: Restore,
) -> Restored:
    """Returns an optimizer's parameters and state with the leaves of a state dict, and a report.

    Args:
      optimizer: the reference.
      state_dict: has mappings `target` and `state`.
      given: the groups of `optimizer`.
      match_rest: restores what belongs to no group: the step, and frozen leaves.
    """
    target, state = optimizer.target, optimizer.state
    is_grouped = isinstance(state.param_states, GroupStates)
    entry = state_dict["state"].get("param_states", {})
    paths = [names for share in given for names in share.paths]
    shape = layout.trie(paths)
    holes = dict.fromkeys(paths, ())
    rest_states = {} if is_grouped else replace_at(_frozen_states(target), holes)
    rest_shape = dict.fromkeys(share.name for share in given) if is_grouped else shape
    rest_dict = {
        "target": layout.leftover(state_dict["target"], shape),
        "state": {
            **state_dict["state"],
            "param_states": layout.leftover(entry, rest_shape),
        },
    }
    (rest, rest_state), report = match_rest(
        replace_at(target, holes), OptimizerState(state.step, rest_states), rest_dict
    )
    reports = [dataclasses.replace(report, state_matched=0)]
    leaves: dict[Names, Any] = {}
    states: dict[Any, Any] = {}
    for share in given:
        written = _own_dict(state_dict, share, is_grouped)
        (new, new_state), found = _restore(share.optimizer, written)
        found = layout.without_step(found)
        leaves |= dict(at_paths(new, share.paths))
        if is_grouped:
            found = layout.renamed(found, share.name)
            states[share.name] = new_state.param_states
        else:
            states |= dict(at_paths(new_state.param_states, share.paths))
        reports.append(found)
    param_states = (
        GroupStates(states) if is_grouped else replace_at(rest_state.param_states, states)
    )
    restored = replace_at(rest, leaves), OptimizerState(rest_state.step, param_states)
    return restored, layout.merged_reports(reports)


def read_list_layout(
    state_dict: Any, given: Sequence[Share], param_states: Any
) -> tuple[Any, tuple[Mismatch, ...]]:
    """Returns a state dict in today's layout, and what of an old one had no place in it."""
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if isinstance(param_states, GroupStates) or not layout.is_list_layout(state):
        return state_dict, ()
    state, problems = layout.from_list_layout(state, [share.paths for share in given])
    return {**state_dict, "state": state}, problems


def _own_dict(state_dict: Mapping[str, Any], share: Share, is_grouped: bool) -> dict[str, Any]:
    """The part of a state dict that one group restores."""
    shape = layout.trie(share.paths)
    state: dict[str, Any] = {"step": share.optimizer.state.step}
    if "param_states" in state_dict["state"]:
        entry = state_dict["state"]["param_states"]
        if not is_grouped:
            state["param_states"] = layout.restrict(entry, shape) if share.paths else {}
        elif isinstance(entry, Mapping) and share.name in entry:
            state["param_states"] = entry[share.name]
    target = layout.restrict(state_dict["target"], shape) if share.paths else {}
    return {"target": target, "state": state}


def _restore(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Restored:
    """By the definition's own `restore_state`, where it has one."""
    definition, target, state = optimizer.optimizer_def, optimizer.target, optimizer.state
    if type(definition).restore_state is OptimizerDef.restore_state:
        return definition._match(target, state, state_dict)
    try:
        restored = definition.restore_state(target, state, state_dict)
    except RestoreError as error:
        return (target, state), error.report
    states = len(jax.tree.leaves(restored[1].param_states))
    return restored, RestoreReport((), len(jax.tree.leaves(restored)), states)


def _frozen_states(target: Any) -> Any:
    """`None` for every parameter, in the parameters' containers."""
    return jax.tree.map(lambda _: None, target)


def _paths(selection: Selection, part: Part) -> tuple[Names, ...]:
    return tuple(selection.paths[i] for i in part.members)


def target_dict(target: Any, step: Any, states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict in the layout of Flax and T5X."""
    return {"target": to_state_dict(target), "state": {"step": to_state_dict(step), **states}}


def is_whole(state_dict: Any) -> bool:
    """Whether it has parameters and a state; else the whole is one deviation."""
    if not isinstance(state_dict, Mapping) or "target" not in state_dict:
        return False
    return isinstance(state_dict.get("state"), Mapping)
