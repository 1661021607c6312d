"""The states of several groups in one tree.

Where every group keeps an entry per parameter, the entries stand at the paths of the parameters,
with `None` where a parameter is frozen, as in Flax and T5X. Otherwise every group's state stands
under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flax.serialization
import jax
from jax.tree_util import DictKey

from opt_core._groups import Names
from opt_core._paths import path_str
from opt_core._selection import Part, Selection
from opt_core.errors import GroupError

if TYPE_CHECKING:
    from opt_core._optimizer import OptimizerDef


@jax.tree_util.register_pytree_with_keys_class
class GroupStates(Mapping[str, Any]):
    """The states of groups by name: an immutable mapping, and a pytree.

    Its own type tells it from a dict of parameters that are called as the groups are.

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
        """Makes it again; for JAX."""
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


def join_states(
    selection: Selection, definitions: Sequence[OptimizerDef], states: Sequence[Any]
) -> Any:
    """Returns one tree of the states of all groups that are not frozen.

    Args:
      selection: how the parameters are divided.
      definitions: one per group, in order.
      states: the `param_states` of each.
    """
    rows = zip(definitions, selection.trained, states, strict=True)
    if all(_is_per_parameter(*row) for row in rows):
        return merge_states(selection, states)
    names = [part.group.name for part in selection.trained]
    return GroupStates(dict(zip(names, states, strict=True)))


def merge_states(selection: Selection, states: Sequence[Any]) -> Any:
    """Returns a tree like the parameters with the states of all groups, `None` where there is none.

    Args:
      selection: how the parameters are divided.
      states: one per group that is not frozen; each has an entry per parameter.
    """
    leaves: list[Any] = [None] * len(selection.paths)
    for part, state in zip(selection.trained, states, strict=True):
        part.paste(state, leaves)
    return selection.treedef.unflatten(leaves)


def split_states(
    selection: Selection, definitions: Sequence[OptimizerDef], params: Any, param_states: Any
) -> list[Any]:
    """Returns the states that were joined."""
    if isinstance(param_states, GroupStates):
        return [param_states[part.group.name] for part in selection.trained]
    states = selection.treedef.flatten_up_to(param_states)
    check_division(selection, definitions, params, dict(zip(selection.paths, states, strict=True)))
    return [part.cut(states) for part in selection.trained]


def check_division(
    selection: Selection,
    definitions: Sequence[OptimizerDef],
    params: Any,
    states: Mapping[Names, Any],
) -> None:
    """Raises a `GroupError` if states by path were made for other groups.

    Args:
      selection: how the parameters are divided.
      definitions: one per group that is not frozen.
      params: the parameters.
      states: entries by path.
    """
    problems = []
    of_part = iter(definitions)
    for part in selection.parts:
        own = {selection.paths[i]: states[selection.paths[i]] for i in part.members}
        absent = [names for names, state in own.items() if state is None]
        if part.group.is_frozen:
            problems += [f"`{path_str(n)}` is frozen and has one" for n in own if n not in absent]
            continue
        definition = next(of_part)
        if absent:
            missing = set(absent) - _without_entry(selection, part, definition, params)
            problems += [
                f"`{path_str(n)}` of {part.group} has none" for n in absent if n in missing
            ]
    if problems:
        raise GroupError(
            "the state was made for other groups than these parameters are divided into:\n"
            + "\n".join(f"  {line}" for line in problems)
            + "\nA pattern that looks at shapes or dtypes divides parameters anew when these "
            "change, as stacked ones do: decide by the path."
        )


def _without_entry(
    selection: Selection, part: Part, definition: OptimizerDef, params: Any
) -> set[Names]:
    """The paths for which the definition itself keeps `None`, as a nested one for frozen leaves."""
    own = part.cut(jax.tree.leaves(params))
    fresh = jax.eval_shape(definition.init_state, own).param_states
    entries = part.treedef.flatten_up_to(fresh)
    return {selection.paths[i] for i, e in zip(part.members, entries, strict=True) if e is None}


def _is_per_parameter(definition: OptimizerDef, part: Part, state: Any) -> bool:
    if definition.whole_tree or isinstance(state, GroupStates):
        return False
    try:
        part.treedef.flatten_up_to(state)
    except (ValueError, TypeError, KeyError):
        return False
    return True
