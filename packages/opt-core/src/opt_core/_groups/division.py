"""Which leaves belong to which group, and the states of the groups, which carry that along.

It is decided once, in `create`: patterns that read shapes would answer otherwise where parameters
are stacked or sharded. From then on it is static data of the state, part of its treedef.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax.serialization
import jax
from jax.tree_util import DictKey

from opt_core._paths import Names, flatten_with_paths, parts_at, path_str
from opt_core.errors import GroupError

MARKER = ()
"""Without leaves: stands where a leaf belongs to another group."""


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """A tree of parameters, divided into groups.

    Attributes:
      names: of all groups, in the order of the table.
      trained: of those that are not frozen.
      owners: for every leaf the position of its group in `names`.
      treedef: the containers of the parameters.
    """

    names: tuple[str, ...]
    trained: tuple[str, ...]
    owners: tuple[int, ...]
    treedef: Any

    @functools.cached_property
    def paths(self) -> tuple[Names, ...]:
        """The names along the path of every leaf."""
        positions = flatten_with_paths(self.treedef.unflatten(range(len(self.owners))))
        return tuple(names for names, position in positions if position is not None)

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
        # It has the containers of the whole, and `()` where a leaf belongs to another group.
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
        paths = {path_str(names) for names, leaf in flatten_with_paths(tree) if leaf is not None}
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
