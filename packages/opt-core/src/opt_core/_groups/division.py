"""Which leaves belong to which group, and the states of the groups, which carry that along."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax.serialization
import jax
from jax.tree_util import DictKey

from opt_core._optimizer import Optimizer, OptimizerDef
from opt_core._state_dict import to_state_dict
from opt_core._trees import Names, named_leaves, parts_at, path_str
from opt_core.errors import GroupError

MARKER = ()
"""Without leaves: stands where a leaf belongs to another group."""


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """A tree of parameters, divided into groups."""

    names: tuple[str, ...]  # of all groups, in the order of the table
    trained: tuple[str, ...]  # of those that are not frozen
    owners: tuple[int, ...]  # for every leaf the position of its group in `names`
    treedef: Any  # the containers of the parameters

    @functools.cached_property
    def paths(self) -> tuple[Names, ...]:
        """The names along the path of every leaf."""
        positions = named_leaves(self.treedef.unflatten(range(len(self.owners))))
        return tuple(names for names, _ in positions)

    @functools.cached_property
    def members(self) -> Mapping[str, tuple[int, ...]]:
        """The positions of the leaves of every group."""
        members: dict[str, list[int]] = {name: [] for name in self.names}
        for position, owner in enumerate(self.owners):
            members[self.names[owner]].append(position)
        return {name: tuple(positions) for name, positions in members.items()}

    @property
    def frozen(self) -> tuple[int, ...]:
        """The positions of the leaves that are not updated."""
        is_frozen = [name not in self.trained for name in self.names]
        return tuple(i for i, owner in enumerate(self.owners) if is_frozen[owner])

    def leaves(self, tree: Any) -> list[Any]:
        """Returns what a tree has at the places of the parameters: arrays, axes, `None`."""
        leaves, structure = jax.tree.flatten(tree)
        if structure == self.treedef:
            return leaves
        parts = parts_at(self.treedef, tree)  # numbers stand for the leaves
        if parts is None:
            raise GroupError(self._mismatch(tree))
        return [jax.tree.map(leaves.__getitem__, part) for part in parts]

    def cut(self, group: str, tree: Any) -> Any:
        """Returns the part of a tree that the definition of a group sees."""
        # It has the containers of all parameters, and `()` where a leaf belongs to another group.
        owner = self.names.index(group)
        pairs = zip(self.leaves(tree), self.owners, strict=True)
        return self.treedef.unflatten([part if i == owner else MARKER for part, i in pairs])

    def paste(self, group: str, tree: Any, leaves: list[Any]) -> None:
        """Puts the leaves of a group, in a tree as `cut` returns it, into the list of all."""
        parts = self.leaves(tree)
        for i in self.members[group]:
            leaves[i] = parts[i]

    def _mismatch(self, tree: Any) -> str:
        expected = {path_str(names) for names in self.paths}
        paths = {path_str(names) for names, _ in named_leaves(tree)}
        lines = [f"  `{path}`: in the state, not in the tree" for path in sorted(expected - paths)]
        lines += [f"  `{path}`: in the tree, not in the state" for path in sorted(paths - expected)]
        lines = lines or [f"  expected {self.treedef}", f"  found {jax.tree.structure(tree)}"]
        return (
            "the state was made for parameters in other containers:\n"
            + "\n".join(lines)
            + "\nCreate the optimizer with these parameters, or take `regroup` for its state."
        )

    @functools.cached_property
    def _value(self) -> tuple[int, Any]:
        value = self.names, self.trained, self.owners, self.treedef
        return hash(value), value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Division) and self._value == other._value

    def __hash__(self) -> int:
        return self._value[0]

    def __reduce__(self) -> Any:  # without the hash: those of strings differ between processes
        return Division, (self.names, self.trained, self.owners, self.treedef)

    def __deepcopy__(self, memo: Any) -> Division:
        return self

    def __repr__(self) -> str:
        counts = (f"{name}: {len(members)}" for name, members in self.members.items())
        return f"Division({', '.join(counts)})"


@jax.tree_util.register_pytree_with_keys_class
class GroupStates(Mapping[str, Any]):
    """The states of groups by name: an immutable mapping, and a pytree.

    Args:
      states: the `param_states` of every group that is not frozen.
      division: which leaves of the parameters belong to which group; static.

    Examples:
      >>> from opt_core import MultiOptimizer, OptimizerDef, OptimizerState
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(0, ())
      >>> definition = MultiOptimizer((r'.*kernel', Sgd(None)), names=['kernels'])
      >>> optimizer = definition.create({'kernel': 1.0, 'bias': 2.0})
      >>> optimizer.state.param_states
      GroupStates({'kernels': ()})
      >>> optimizer.state.param_states.division
      Division(kernels: 1, rest: 1)
    """

    __slots__ = ("_states", "division")

    def __init__(self, states: Mapping[str, Any], division: Division) -> None:
        self._states = {name: states[name] for name in division.trained}
        self.division = division

    def __getitem__(self, name: str) -> Any:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"GroupStates({self._states!r})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Any]], Division]:
        """Returns the states with their keys, and what is static; for JAX."""
        return [(DictKey(name), state) for name, state in self._states.items()], self.division

    def tree_flatten(self) -> tuple[list[Any], Division]:
        """Returns the states, and what is static; for JAX."""
        return list(self._states.values()), self.division

    @classmethod
    def tree_unflatten(cls, division: Division, states: Iterable[Any]) -> GroupStates:
        """Rebuilds it; for JAX."""
        return cls(dict(zip(division.trained, states, strict=True)), division)


flax.serialization.register_serialization_state(
    GroupStates,
    lambda groups: {name: flax.serialization.to_state_dict(groups[name]) for name in groups},
    lambda groups, written: GroupStates(
        {
            name: flax.serialization.from_state_dict(groups[name], written[name], name=name)
            for name in groups
        },
        groups.division,
    ),
)


# State dicts: one tree with an entry per parameter, as Flax and T5X wrote it, or one per group.


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
            state_dict = {"target": to_state_dict(part.target), "state": written}
            _, restored = part.optimizer_def.restore_state(part.target, part.state, state_dict)
            states[name] = restored.param_states
    return GroupStates(states, division)


def _merged(optimizer: Optimizer) -> Any:
    """The states as one tree with an entry per parameter; `None` where that is not so."""
    parts = _split(optimizer)  # an error if the state is of other groups, or of none
    division = optimizer.state.param_states.division
    positions = division.treedef.unflatten(range(len(division.owners)))
    entries: list[Any] = [None] * len(division.owners)
    for name, part in parts.items():
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
