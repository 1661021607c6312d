"""The report on a moved state: what became of every leaf, and what a caller may allow.

Surgery in memory and restores from checkpoints use the same words.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from typing import Literal, TypeAlias

from opt_core._description.values import LeafDescription
from opt_core._paths import path_str

Action: TypeAlias = Literal["kept", "renamed", "converted", "initialised", "dropped"]
"""What became of a leaf.

`kept`: the same leaf with the same value, possibly at another path. `renamed`: the same leaf, but
its transformation has another name or number. `converted`: another dtype or shape. `initialised`: a
new leaf. `dropped`: an old leaf without a successor.
"""

Allowance: TypeAlias = Literal["initialise", "drop", "cast", "reshape", "regroup", "optimizer"]
"""A change that a caller may allow.

`initialise`: a leaf that the source lacks. `drop`: a trained leaf without a successor. `cast`:
another dtype, if every value fits. `reshape`: another shape of the same size. `regroup`: a leaf
whose parameter is in another group. `optimizer`: transformations that behave differently, or act in
another order.
"""

_SHOWN = 40


def check_allowances(allow: Iterable[str]) -> frozenset[str]:
    """Returns the allowed changes as a set.

    Raises:
      TypeError: `allow` is a string, which would be read letter by letter.
      ValueError: a word is unknown.

    Examples:
      >>> sorted(check_allowances(['drop', 'cast']))
      ['cast', 'drop']
    """
    if isinstance(allow, str):
        raise TypeError(
            f"`allow` must be a set of words; found the string {allow!r}: give `{{{allow!r}}}`"
        )
    known = frozenset(typing.get_args(Allowance))
    if unknown := sorted(frozenset(allow) - known):
        raise ValueError(f"`allow`: expected words among {sorted(known)}, found {unknown}")
    return frozenset(allow)


@dataclasses.dataclass(frozen=True, slots=True)
class LeafChange:
    """What became of one leaf.

    Attributes:
      action: see `Action`.
      path: its path in the new `param_states`; in the old ones if it was dropped.
      leaf: what it means there.
      sources: the paths in the old state that it comes from; several if groups agreed.
      note: the reason, as text.
    """

    action: Action
    path: str
    leaf: LeafDescription
    sources: tuple[str, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class ChangeReport:
    """What became of the leaves of a state; `str` lists them by action.

    Attributes:
      changes: one per leaf of the new state, in the order of JAX, then those that were dropped.

    Examples:
      >>> mu = LeafDescription(
      ...     ('0', 'mu', 'w'), (), 'adam', 1, ('mu',), ('w',), (0, 1), 'moment', 'stated')
      >>> report = ChangeReport((LeafChange('kept', '0/mu/w', mu, ('mu/w',)),))
      >>> report.kept, report.dropped
      (('0/mu/w',), ())
      >>> print(report)
      kept 1
        0/mu/w
    """

    changes: tuple[LeafChange, ...]

    def paths(self, action: Action) -> tuple[str, ...]:
        """Returns the paths of the leaves with an action."""
        return tuple(change.path for change in self.changes if change.action == action)

    @property
    def kept(self) -> tuple[str, ...]:
        """Paths in the new state of leaves that are the same, with the same value."""
        return self.paths("kept")

    @property
    def renamed(self) -> tuple[str, ...]:
        """Paths in the new state of leaves whose transformation has another name or number."""
        return self.paths("renamed")

    @property
    def converted(self) -> tuple[str, ...]:
        """Paths in the new state of leaves with another dtype or shape."""
        return self.paths("converted")

    @property
    def initialised(self) -> tuple[str, ...]:
        """Paths in the new state of new leaves."""
        return self.paths("initialised")

    @property
    def dropped(self) -> tuple[str, ...]:
        """Paths in the old state of leaves without a successor."""
        return self.paths("dropped")

    def __str__(self) -> str:
        lines: list[str] = []
        for action in typing.get_args(Action):
            found = [change for change in self.changes if change.action == action]
            if found:
                lines += [f"{action} {len(found)}", *map(_line, found)]
        return "\n".join(lines) or "no leaves"


def listed(leaves: Iterable[str]) -> str:
    """Returns lines for an error message, shortened if there are many."""
    lines = list(leaves)
    more = [f"  ... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*(f"  {line}" for line in lines[:_SHOWN]), *more])


def leaf_path(leaf: LeafDescription) -> str:
    """Returns the path of a leaf as a string."""
    return path_str(leaf.path)


def _line(change: LeafChange) -> str:
    return f"  {change.path}{f': {change.note}' if change.note else ''}"
