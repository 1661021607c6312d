"""State dicts of several groups: splitting them by path, and Flax's older layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from opt_core._paths import Names
from opt_core._report import Mismatch, MismatchKind, RestoreReport
from opt_core._state_dict import to_state_dict

STATES = ("state", "param_states")

# One level of nested mappings at a time.


def get_at(tree: Any, names: Names, default: Any = None) -> Any:
    """Returns the value of nested dicts at a path, or `default`."""
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return default
        tree = tree[name]
    return tree


def set_at(tree: dict[str, Any], names: Names, value: Any) -> None:
    """Sets the value of nested dicts at a path, creating missing ones."""
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value


def trie(paths: Iterable[Names]) -> Any:
    """Returns nested dicts with `None` at every path; `None` if the only path is the root."""
    root: dict[str, Any] = {}
    for names in paths:
        if not names:
            return None
        set_at(root, names, None)
    return root


def restrict(value: Any, shape: Any) -> Any:
    """Returns the part of nested mappings that lies on the paths of a trie.

    A mapping with two keys of the same name is kept whole; restoring it reports them.
    """
    if shape is None or not isinstance(value, Mapping):
        return value
    given = {str(key): child for key, child in value.items()}
    if len(given) < len(value):
        return value
    return {name: restrict(given[name], shape[name]) for name in shape if name in given}


def leftover(value: Any, shape: Any) -> Any:
    """Returns nested mappings without the paths of a trie; see `restrict`."""
    if shape is None:
        return {}
    if not isinstance(value, Mapping):
        return value
    given = {str(key): child for key, child in value.items()}
    if len(given) < len(value):
        return value
    return {
        name: leftover(child, shape[name]) if name in shape else child
        for name, child in given.items()
        if name not in shape or shape[name] is not None
    }


# Reports.


def renamed(report: RestoreReport, name: str) -> RestoreReport:
    """Returns a report whose state paths include the group's name."""
    old = "/".join(STATES)

    def moved(mismatch: Mismatch) -> Mismatch:
        path = mismatch.path
        if path == old or path.startswith(f"{old}/"):
            path = f"{old}/{name}{path[len(old) :]}"
        return dataclasses.replace(mismatch, path=path)

    return dataclasses.replace(report, mismatches=tuple(map(moved, report.mismatches)))


def without_step(report: RestoreReport) -> RestoreReport:
    """Returns a group's report without the step, which the groups share."""
    return dataclasses.replace(report, matched=max(report.matched - 1, 0))


def merged_reports(reports: Sequence[RestoreReport]) -> RestoreReport:
    """Returns a combined report, each path once."""
    found = {(m.path, m.kind): m for report in reversed(reports) for m in report.mismatches}
    order = dict.fromkeys((m.path, m.kind) for report in reports for m in report.mismatches)
    return RestoreReport(
        tuple(found[key] for key in order),
        sum(report.matched for report in reports),
        sum(report.state_matched for report in reports),
    )


# The layout of Flax before 0.3.3.


def is_list_layout(state: Any) -> bool:
    """Whether it is a list with a state per group, as Flax wrote until 0.3.2."""
    entries = _items(state)
    return bool(entries) and all(
        isinstance(entry, Mapping) and {"step", "param_states"} >= set(entry) >= {"step"}
        for entry in entries
    )


def from_list_layout(
    state: Any, members: Sequence[Sequence[Names]]
) -> tuple[dict[str, Any], tuple[Mismatch, ...]]:
    """Returns the state in today's layout, and the entries that do not fit it.

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
        # Flax went through the leaves in the order of their paths, component by component: `a`
        # before `a-1`, and "10" before "2".
        paths = sorted(members[i]) if i < len(members) else []
        for names, value in zip(paths, states, strict=False):
            set_at(param_states, names, value)
        problems += [
            Mismatch(f"state/{i}/param_states/{j}", MismatchKind.EXTRA, "nothing", "a state")
            for j in range(len(paths), len(states))
        ]
    return {"step": entries[0]["step"], "param_states": param_states}, tuple(problems)


def _items(value: Any) -> list[Any]:
    """The items of a list, or of a list as it appears in a state dict; otherwise none."""
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, Mapping):
        return []
    given = {str(key): item for key, item in value.items()}
    order = [str(i) for i in range(len(value))]
    return [given[name] for name in order] if set(order) == set(given) else []


def _same_number(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def blank(tree: Any) -> Any:
    """Returns the state dict of `tree` with `None` for every leaf."""
    return to_state_dict(jax.tree.map(lambda _: None, tree))
