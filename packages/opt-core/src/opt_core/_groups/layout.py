"""State dicts of groups: one tree of the parameters, or an entry for each group.

Flax and T5X wrote the states of all groups as one tree with an entry per parameter. That is
possible where every group keeps such an entry; otherwise each group has its own, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from opt_core._groups.division import GroupStates
from opt_core._optimizer import Optimizer, OptimizerDef
from opt_core._paths import parts_at
from opt_core._state_dict import to_state_dict


def written_states(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the `param_states` of a state dict, under that name; nothing if there are none."""
    if (merged := _merged(optimizer)) is not None:
        return {"param_states": to_state_dict(merged)}
    entries = {name: _written(part) for name, part in _split(optimizer).items()}
    entries = {
        name: entry for name, entry in entries.items() if entry or not isinstance(entry, Mapping)
    }
    return {"param_states": entries} if entries else {}


def to_layout(optimizer: Optimizer) -> Any:
    """Returns the states in the containers of a state dict."""
    if (merged := _merged(optimizer)) is not None:
        return merged
    states: dict[str, Any] = {}
    for name, part in _split(optimizer).items():
        if isinstance(part.state.param_states, GroupStates):
            states[name] = to_layout(part)
        elif _restores_itself(part.optimizer_def):
            states[name] = _written(part)
        else:
            states[name] = part.state.param_states
    return GroupStates(states, optimizer.state.param_states.division)


def from_layout(optimizer: Optimizer, layout: Any) -> GroupStates:
    """Returns the states of which `to_layout` made a layout, which has been restored."""
    division = optimizer.state.param_states.division
    is_grouped = isinstance(layout, GroupStates)
    states: dict[str, Any] = {}
    for name, part in _split(optimizer).items():
        states[name] = layout[name] if is_grouped else division.cut(name, layout)
        if isinstance(part.state.param_states, GroupStates):
            states[name] = from_layout(part, states[name])
        elif _restores_itself(part.optimizer_def):
            step, entry = (to_state_dict(x) for x in (part.state.step, states[name]))
            written = {"step": step, "param_states": entry}
            whole = {"target": to_state_dict(part.target), "state": written}
            _, restored = part.optimizer_def.restore_state(part.target, part.state, whole)
            states[name] = restored.param_states
    return GroupStates(states, division)


def _merged(optimizer: Optimizer) -> Any:
    """The states as one tree with an entry per parameter; `None` where that is not so."""
    definition: Any = optimizer.optimizer_def
    division = definition.division(optimizer.state)
    positions = division.treedef.unflatten(range(len(division.owners)))
    entries: list[Any] = [None] * len(division.owners)
    for name, part in _split(optimizer).items():
        states = part.state.param_states
        if isinstance(states, GroupStates):
            states = _merged(part)
        elif _writes_itself(part.optimizer_def) or _restores_itself(part.optimizer_def):
            return None  # it has a layout of its own
        structure: Any = jax.tree.structure(division.cut(name, positions))
        if states is None or parts_at(structure, states) is None:
            return None
        division.paste(name, states, entries)
    return division.treedef.unflatten(entries)


def _split(optimizer: Optimizer) -> dict[str, Optimizer]:
    definition: Any = optimizer.optimizer_def
    parts: dict[str, Optimizer] = definition.split(optimizer)
    return parts


def _written(part: Optimizer) -> Any:
    state = part.optimizer_def.state_dict(part.target, part.state)["state"]
    return state.get("param_states", {})


def _writes_itself(definition: OptimizerDef) -> bool:
    return type(definition).state_dict is not OptimizerDef.state_dict


def _restores_itself(definition: OptimizerDef) -> bool:
    return type(definition).restore_state is not OptimizerDef.restore_state
