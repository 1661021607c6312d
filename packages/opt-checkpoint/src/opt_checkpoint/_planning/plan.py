"""What a restore would do, as data that prints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar

import jax.numpy as jnp

from opt_checkpoint._naming.schema import LeafInfo, Source
from opt_checkpoint._planning.rules import KINDS, Map, Pad, Rename, Stack, Unstack
from opt_checkpoint._targets.view import View
from opt_checkpoint.errors import PlanError

_LISTED = 40
_Target = TypeVar("_Target")


@dataclasses.dataclass(frozen=True)
class Row:
    """What becomes of one leaf of the target.

    Attributes:
      leaf: the leaf.
      action: `'matched'` (taken as it is), `'converted'`, `'initialised'`, or `'kept'` (as it is in
        the target).
      sources: the names in the checkpoint that it comes from.
      kinds: what has to be admitted for it: see `Kind`; and `'rename'`, `'stack'`, `'map'` or
        `'pad'` where a rule does that. Empty for what is matched.
      by: the rule that says how, if one does.
      how: what a rule other than `Rename` does with the values: `'stack'`, `'slice'`, `'map'`,
        `'pad'`; `'maximum'` of its sources, `'maxima'` of each, or the `'first'` of them.
      axis: the dimension along which it does: of the leaf, or of its source where it is a slice.
      is_opaque: whether the function of a `Map` needs values, so that its result is not known yet.
      index: of an unstacked leaf, its position.
      note: why, for people to read.
      problem: what makes it impossible; empty if nothing does.
      is_admitted: whether `allow` or a rule admits it.
      value: that of its source, where it is a single integer.
    """

    leaf: LeafInfo
    action: Literal["matched", "converted", "initialised", "kept"]
    sources: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    by: Rename | Stack | Unstack | Map | Pad | None = None
    how: Literal["", "stack", "slice", "map", "pad", "maximum", "maxima", "first"] = ""
    axis: int = 0
    is_opaque: bool = False
    index: int | None = None
    note: str = ""
    problem: str = ""
    is_admitted: bool = True
    value: int | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it can and may be done."""
        return self.is_admitted and not self.problem


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A leaf of the checkpoint that is not used.

    Attributes:
      leaf: the leaf.
      problem: what makes it impossible to go on without it; empty if nothing does.
      is_admitted: whether `allow` or a rule admits it.
    """

    leaf: LeafInfo
    problem: str = ""
    is_admitted: bool = True

    @property
    def is_ok(self) -> bool:
        """Whether it may be left out."""
        return self.is_admitted and not self.problem


@dataclasses.dataclass(frozen=True)
class Plan(Generic[_Target]):
    """What a restore would do with every leaf; nothing has been read, nothing done.

    Prints as a summary with every leaf that is not matched; `table()` has all of them.

    Attributes:
      rows: one per leaf of the target.
      dropped: the leaves of the checkpoint that no leaf of the target comes from.
      changes: how the optimizer differs from the one that was saved.
      problems: what is wrong beside single leaves.
      allow: the kinds that are admitted.
      source: where leaves are read from.
      target: what is restored, as it was given.
      view: what the planner sees of it.
      suggestions: transformations that may have been renamed, with the rule that says so.
    """

    rows: tuple[Row, ...]
    dropped: tuple[Dropped, ...]
    changes: tuple[str, ...]
    problems: tuple[str, ...]
    allow: frozenset[str]
    source: Source = dataclasses.field(repr=False, compare=False)
    target: _Target = dataclasses.field(repr=False, compare=False)
    view: View = dataclasses.field(repr=False, compare=False)
    suggestions: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether `apply` would do it."""
        leaves = all(row.is_ok for row in self.rows) and all(x.is_ok for x in self.dropped)
        return leaves and not self.problems and not self._refused_changes

    @property
    def is_exact(self) -> bool:
        """Whether every leaf is matched, none is dropped, and the optimizer is the same."""
        matched = all(row.action == "matched" for row in self.rows)
        return matched and self.is_ok and not self.dropped and not self.changes

    @property
    def missing_kinds(self) -> frozenset[str]:
        """What would have to be in `allow` besides, for all that is possible at all."""
        kinds = {k for row in self.rows if not row.is_admitted for k in row.kinds}
        kinds |= {"drop" for row in self.dropped if not row.is_admitted}
        kinds |= {"optimizer"} if self._refused_changes else set()
        return frozenset(kinds & KINDS) - self.allow

    @property
    def _refused_changes(self) -> bool:
        return bool(self.changes) and "optimizer" not in self.allow

    def check(self) -> Plan[_Target]:
        """Returns the plan itself.

        Raises:
          PlanError: it cannot or may not be done; its text is the plan.
        """
        if self.is_ok:
            return self
        count = sum(not row.is_ok for row in self.rows)
        count += sum(not gone.is_ok for gone in self.dropped)
        head = "the checkpoint does not fit the optimizer as it is"
        if count:
            head += f": {count} {'leaf' if count == 1 else 'leaves'}"
        advice = ""
        if self.missing_kinds:
            kinds = ", ".join(f"'{kind}'" for kind in sorted(self.missing_kinds))
            advice = (
                f"\nIf that is meant, admit it: `allow={{{kinds}}}`, or `rules=` for single leaves."
            )
        raise PlanError(f"{head}\n{self}{advice}", self)

    def apply(self) -> _Target:
        """Reads the leaves that are used and returns the restored target, of the kind it was given.

        Every leaf is where the target's is, of its shape and dtype. Nothing is shared with the
        target or the checkpoint, so that it can be donated; but fields that a subclass of
        `TrainState` adds are the target's own. The target stays as it is, models of NNX too.

        Raises:
          PlanError: the plan cannot or may not be done.
          DamagedError: a leaf in the checkpoint is not what was written.
          LeafError: a value does not fit the dtype that it is cast to; says which leaf.
        """
        from opt_checkpoint._planning.apply import apply_plan

        restored: _Target = self.view.put_back(*apply_plan(self.check()))
        return restored

    def diff(self) -> str:
        """Returns a line for each leaf that is not matched.

        `+` is initialised, `-` dropped, `~` converted, `=` kept, or matched where a rule for other
        leaves of its parameter does nothing to it; `!` marks what is not admitted or impossible.
        """
        return "\n".join(self._diff())

    def _diff(self) -> Iterator[str]:
        signs = {"initialised": "+", "converted": "~", "kept": "=", "matched": "="}
        for row in self.rows:
            is_told = row.by is not None and row.leaf.parameter is not None
            if row.action != "matched" or not row.is_ok or is_told:
                mark = " " if row.is_ok else "!"
                yield f"{mark}{signs[row.action]} {_line(row.leaf)}{_told(row)}"
        for gone in self.dropped:
            why = f": {gone.problem}" if gone.problem else ""
            yield f"{' ' if gone.is_ok else '!'}- {_line(gone.leaf)}{why}"

    def table(self) -> str:
        """Returns a line for every leaf of the target, then for those that are dropped."""
        head = ("leaf", "shape", "dtype", "action", "from", "note")
        lines = [
            (
                row.leaf.name,
                str(list(row.leaf.shape)),
                row.leaf.dtype,
                row.action if row.is_ok else f"{row.action} (refused)",
                _sources(row),
                row.problem or row.note,
            )
            for row in self.rows
        ]
        lines += [
            (
                gone.leaf.name,
                str(list(gone.leaf.shape)),
                gone.leaf.dtype,
                "dropped" if gone.is_ok else "dropped (refused)",
                "",
                gone.problem,
            )
            for gone in self.dropped
        ]
        widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
        cells = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *lines)
        ]
        return "\n".join([*cells, self.summary()])

    def summary(self) -> str:
        """Returns one line: how many leaves, and bytes, become what."""
        parts = []
        for action in ("matched", "converted", "initialised", "kept"):
            leaves = [row.leaf for row in self.rows if row.action == action]
            if leaves or action == "matched":
                parts.append(f"{len(leaves)} {action} ({sum(map(leaf_bytes, leaves)):,} bytes)")
        gone = [row.leaf for row in self.dropped]
        if gone:
            parts.append(f"{len(gone)} dropped ({sum(map(leaf_bytes, gone)):,} bytes)")
        return ", ".join(parts)

    def to_data(self) -> dict[str, Any]:
        """Returns the plan as JSON has data."""
        return {
            "is_ok": self.is_ok,
            "rows": [_row_data(row) for row in self.rows],
            "dropped": [dataclasses.asdict(x) | {"name": x.leaf.name} for x in self.dropped],
            "changes": list(self.changes),
            "problems": list(self.problems),
            "suggestions": list(self.suggestions),
            "allow": sorted(self.allow),
        }

    def __str__(self) -> str:
        lines = list(self._diff())
        # What stands in the way comes first, and is never cut off.
        lines.sort(key=lambda line: not line.startswith("!"))
        urgent = sum(line.startswith("!") for line in lines)
        shown = max(_LISTED, urgent)
        if len(lines) > shown:
            lines = [*lines[:shown], f"... and {len(lines) - shown} more: `table()` has all"]
        sign = "!" if self._refused_changes else " "
        changed = [f"{sign}* optimizer: {change}" for change in self.changes]
        wrong = [f"!* {problem}" for problem in self.problems]
        asked = [f"?* {suggestion}" for suggestion in self.suggestions]
        return "\n".join([self.summary(), *wrong, *asked, *changed, *lines])


def leaf_bytes(leaf: LeafInfo) -> int:
    """Returns the size of a leaf in bytes; of typed PRNG keys, as many words as they have.

    A Python scalar among the extras has none: it is in the manifest.
    """
    if leaf.dtype == "python":
        return 0
    size = 8 if leaf.is_key else jnp.dtype(leaf.dtype).itemsize
    return math.prod(leaf.shape) * size


def _row_data(row: Row) -> dict[str, Any]:
    data = dataclasses.asdict(row) | {"name": row.leaf.name}
    if isinstance(row.by, Map):
        data["by"] = {"source": row.by.source, "fn": function_name(row.by.fn)}
    return data


def function_name(fn: Any) -> str:
    """Returns what a function is called, for people to read.

    Examples:
      >>> function_name(jnp.transpose)
      'transpose'
    """
    return str(getattr(fn, "__name__", type(fn).__name__))


def _line(leaf: LeafInfo) -> str:
    return f"{leaf.name} {leaf.dtype}{list(leaf.shape)}"


def _told(row: Row) -> str:
    parts = []
    if row.sources and row.action == "converted":
        parts.append(f" <- {_sources(row)}")
    if row.problem or row.note:
        parts.append(f": {row.problem or row.note}")
    return "".join(parts)


def _sources(row: Row) -> str:
    if len(row.sources) > 2:
        return f"{row.sources[0]} .. {row.sources[-1]} ({len(row.sources)})"
    where = ""
    if row.index is not None:
        where = f"[{', '.join([*[':'] * row.axis, str(row.index)])}]"
    return ", ".join(row.sources) + where
