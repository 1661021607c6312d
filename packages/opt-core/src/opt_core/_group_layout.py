"""The state of several groups in one tree, and in one state dict.

Where every group keeps an entry per parameter, the entries stand at the paths of the parameters,
with `None` where a parameter is frozen: what Flax (from 0.3.3 on) and T5X wrote. Otherwise every
group has an entry of its own, under its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flax.serialization
import jax
import numpy as np
from jax.tree_util import DictKey

from opt_core._groups import Names
from opt_core._report import Mismatch, MismatchKind, RestoreReport
from opt_core._state_dict import to_state_dict
from opt_core.errors import RestoreError

if TYPE_CHECKING:
    from opt_core._optimizer import OptimizerDef, OptimizerState

STATES = ("state", "param_states")


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


# One level of nested mappings at a time.


def get_at(tree: Any, names: Names, default: Any = None) -> Any:
    """Returns what nested dicts have at a path, or `default`."""
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return default
        tree = tree[name]
    return tree


def set_at(tree: dict[str, Any], names: Names, value: Any) -> None:
    """Sets what nested dicts have at a path, making those that are not there."""
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value


def trie(paths: Iterable[Names]) -> Any:
    """Returns nested dicts with `None` at every path; `None` where the only path is the root."""
    root: dict[str, Any] = {}
    for names in paths:
        if not names:
            return None
        set_at(root, names, None)
    return root


def restrict(value: Any, shape: Any) -> Any:
    """Returns the part of nested mappings that lies on the paths of a trie."""
    if shape is None or not isinstance(value, Mapping):
        return value
    given = {str(key): child for key, child in value.items()}
    return {name: restrict(given[name], shape[name]) for name in shape if name in given}


def leftover(value: Any, shape: Any) -> Any:
    """Returns nested mappings without what lies on the paths of a trie."""
    if not isinstance(value, Mapping):
        return value
    given = {str(key): child for key, child in value.items()}
    return {
        name: leftover(child, shape[name]) if name in shape else child
        for name, child in given.items()
        if name not in shape or shape[name] is not None
    }


# Restoring.


def restore_group(
    definition: OptimizerDef, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
    """Restores one group by its own definition, even one that has a `restore_state` of its own."""
    from opt_core._optimizer import OptimizerDef

    if type(definition).restore_state is OptimizerDef.restore_state:
        return definition._match(target, state, state_dict)
    try:
        restored = definition.restore_state(target, state, state_dict)
    except RestoreError as error:
        return (target, state), error.report
    states = len(jax.tree.leaves(restored[1].param_states))
    return restored, RestoreReport((), len(jax.tree.leaves(restored)), states)


def renamed(report: RestoreReport, name: str) -> RestoreReport:
    """Returns a report whose paths in the state lead through the group's name."""
    old = "/".join(STATES)

    def moved(mismatch: Mismatch) -> Mismatch:
        path = mismatch.path
        if path == old or path.startswith(f"{old}/"):
            path = f"{old}/{name}{path[len(old) :]}"
        return dataclasses.replace(mismatch, path=path)

    return dataclasses.replace(report, mismatches=tuple(map(moved, report.mismatches)))


def without_step(report: RestoreReport) -> RestoreReport:
    """Returns a group's report not counting the step, which the groups share."""
    return dataclasses.replace(report, matched=max(report.matched - 1, 0))


def merged_reports(reports: Sequence[RestoreReport]) -> RestoreReport:
    """Returns one report of all, each path once."""
    found = {(m.path, m.kind): m for report in reversed(reports) for m in report.mismatches}
    order = dict.fromkeys((m.path, m.kind) for report in reports for m in report.mismatches)
    return RestoreReport(
        tuple(found[key] for key in order),
        sum(report.matched for report in reports),
        sum(report.state_matched for report in reports),
    )


# The layout of Flax before 0.3.3.


def is_list_layout(state: Any) -> bool:
    """Whether it is a list of one state per group, as Flax wrote until 0.3.2."""
    entries = _items(state)
    return bool(entries) and all(
        isinstance(entry, Mapping) and {"step", "param_states"} >= set(entry) >= {"step"}
        for entry in entries
    )


def from_list_layout(
    state: Any, members: Sequence[Sequence[Names]]
) -> tuple[dict[str, Any], tuple[Mismatch, ...]]:
    """Returns the state in today's layout, and what had no place in it.

    Args:
      state: a list, or a dict with keys `'0'`, `'1'`, ..., of `{'step', 'param_states'}`.
      members: the paths of the leaves of every group.
    """
    entries = _items(state)
    problems = []
    param_states: dict[str, Any] = {}
    for i, entry in enumerate(entries):
        if not _same_number(entry["step"], entries[0]["step"]):
            expected = f"{entries[0]['step']}, the step of the first group"
            found = Mismatch(f"state/{i}/step", MismatchKind.VALUE, expected, str(entry["step"]))
            problems.append(found)
        states = _items(entry.get("param_states", {}))
        # Flax went through the leaves in the order of their joined paths.
        paths = sorted(members[i], key="/".join) if i < len(members) else []
        for names, value in zip(paths, states, strict=False):
            set_at(param_states, names, value)
        problems += [
            Mismatch(f"state/{i}/param_states/{j}", MismatchKind.EXTRA, "nothing", "a state")
            for j in range(len(paths), len(states))
        ]
    return {"step": entries[0]["step"], "param_states": param_states}, tuple(problems)


def _items(value: Any) -> list[Any]:
    """The items of a list, or of what a list is in a state dict; none of anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, Mapping):
        return []
    given = {str(key): item for key, item in value.items()}
    order = [str(i) for i in range(len(given))]
    return [given[name] for name in order] if set(order) == set(given) else []


def _same_number(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def blank(tree: Any) -> Any:
    """Returns the state dict of `tree` with `None` for every leaf."""
    return to_state_dict(jax.tree.map(lambda _: None, tree))
