"""The states of several groups, each as its definition keeps it, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.serialization
import jax
from jax.tree_util import DictKey

from opt_core._groups.selection import GroupSelection, Selection, at_paths
from opt_core._optimizer import OptimizerDef
from opt_core._paths import parts_at, path_str
from opt_core.errors import GroupError


@jax.tree_util.register_pytree_with_keys_class
class GroupStates(Mapping[str, Any]):
    """The states of groups by name: an immutable mapping, and a pytree.

    Its own type distinguishes it from a dict of parameters named like the groups.

    Args:
      states: the `param_states` of every group that is not frozen.

    Examples:
      >>> states = GroupStates({'kernels': 1, 'biases': 2})
      >>> states['biases'], list(states)
      (2, ['kernels', 'biases'])
    """

    __slots__ = ("_states",)

    def __init__(self, states: Mapping[str, Any]) -> None:
        self._states = dict(states)

    def __getitem__(self, name: str) -> Any:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"GroupStates({self._states!r})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Any]], tuple[str, ...]]:
        """Returns the states with their keys, and the names; for JAX."""
        return [(DictKey(name), state) for name, state in self._states.items()], tuple(self)

    def tree_flatten(self) -> tuple[list[Any], tuple[str, ...]]:
        """Returns the states, and the names; for JAX."""
        return list(self._states.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], states: Iterable[Any]) -> GroupStates:
        """Rebuilds it; for JAX."""
        return cls(dict(zip(names, states, strict=True)))


flax.serialization.register_serialization_state(
    GroupStates,
    lambda groups: {name: flax.serialization.to_state_dict(groups[name]) for name in groups},
    lambda groups, written: GroupStates(
        {
            name: flax.serialization.from_state_dict(groups[name], written[name], name=name)
            for name in groups
        }
    ),
)


def join_states(selection: Selection, states: Iterable[Any]) -> GroupStates:
    """Returns the `param_states` of all groups that are not frozen, given in their order."""
    names = (part.group.name for part in selection.trained)
    return GroupStates(dict(zip(names, states, strict=True)))


def split_states(
    selection: Selection,
    definitions: Sequence[OptimizerDef],
    leaves: Sequence[Any] | None,
    param_states: Any,
) -> list[Any]:
    """Splits the states by group.

    Args:
      selection: how the parameters are divided.
      definitions: one per group that is not frozen, in order.
      leaves: the parameters; `None` if their places hold something else.
      param_states: the states.

    Raises:
      GroupError: the states were made for other groups.
    """
    names = [part.group.name for part in selection.trained]
    is_grouped = isinstance(param_states, GroupStates)
    if not is_grouped or set(param_states) != set(names):
        found = f"groups {list(param_states)}" if is_grouped else f"a {type(param_states).__name__}"
        raise GroupError(
            f"`param_states`: expected `GroupStates` of the groups {names}, found {found}. Create "
            "the optimizer with this definition, carry its state over with `regroup`, or read a "
            "state dict with `restore_state`."
        )
    states = [param_states[name] for name in names]
    if leaves is not None:
        rows = zip(selection.trained, definitions, states, strict=True)
        _check_members([line for row in rows for line in _wrong_members(selection, *row, leaves)])
    return states


def _wrong_members(
    selection: Selection,
    part: GroupSelection,
    definition: OptimizerDef,
    state: Any,
    leaves: Sequence[Any],
) -> Iterator[str]:
    """Lines for missing and extra parameters of a state with entries per parameter."""
    if definition.whole_tree:
        return
    paths = [selection.paths[i] for i in part.members]
    found = parts_at(part.treedef, state)
    if found is not None:
        entries = dict(zip(paths, found, strict=True))
    else:
        entries = dict(at_paths(state, selection.paths))
        if len(jax.tree.leaves(list(entries.values()))) < len(jax.tree.leaves(state)):
            return  # not a state with an entry per parameter
    absent = [names for names in paths if entries.get(names) is None]
    extra = sorted(entries.keys() - set(paths))
    if not absent and not extra:
        return
    # This may be intended: a definition may keep nothing for some parameters.
    fresh = jax.eval_shape(definition.init_state, part.cut(leaves)).param_states
    expected: Any = jax.tree.structure(fresh)
    if expected == jax.tree.structure(state):
        return
    yield from (f"`{path_str(n)}` of {part.group} has none" for n in absent)
    yield from (f"`{path_str(n)}` has one in {part.group}" for n in extra)


def _check_members(problems: Sequence[str]) -> None:
    if problems:
        raise GroupError(
            "the state was made for other groups than those of these parameters:\n"
            + "\n".join(f"  {line}" for line in problems)
            + "\nA pattern that reads shapes or dtypes may assign parameters to other groups when "
            "these change, for example when they are stacked: decide by the path."
        )
