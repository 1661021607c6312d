"""What a restore would do, as printable data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar, get_args

import jax.numpy as jnp
from opt_core import ChangeReport, LeafChange

from opt_checkpoint._naming.schema import LeafInfo, Source, shown
from opt_checkpoint._planning.functions import function_name
from opt_checkpoint._planning.rules import KINDS, Map, Pad, Rename, Stack, Unstack
from opt_checkpoint._targets.view import View
from opt_checkpoint.errors import PlanError

Action: TypeAlias = Literal["kept", "renamed", "converted", "initialised", "dropped"]
"""What becomes of a leaf: the words of `opt_core.LeafChange`."""

_LISTED = 40
_SIGNS: Final = dict(zip(get_args(Action), "=~~+-", strict=True))
_Target = TypeVar("_Target")


@dataclasses.dataclass(frozen=True)
class Row:
    """What becomes of one leaf: an `opt_core.LeafChange`, and how.

    Attributes:
      leaf: of the target; of one that is dropped, of the checkpoint.
      action: `'kept'`: unchanged. `'renamed'`: unchanged, from another name. `'converted'`: made
        from leaves of the checkpoint. `'initialised'`: new, or the target's own. `'dropped'`: not
        used.
      sources: the names in the checkpoint that it is made from.
      kinds: what must be admitted for it, words of `allow=`; and `'rename'`, `'stack'`, `'map'` or
        `'pad'` if a rule does that. Empty for leaves that are kept.
      by: the action of its rule, if any; `'keep'` for the target's own value.
      how: what a rule other than `Rename` does with the values: `'stack'`, `'slice'`, `'map'`,
        `'pad'`; `'maximum'` of its sources, `'maxima'` of each, or the `'first'` of them.
      axis: the dimension along which it does so: of the leaf, or of the source of a slice.
      is_opaque: whether the function of a `Map` needs values, so its result is not known yet.
      index: the position of an unstacked leaf.
      note: the reason, as text.
      problem: why it is impossible; empty if it is not.
      is_admitted: whether `allow` or a rule admits it.
      value: of its source, if it is a single integer.
    """

    leaf: LeafInfo
    action: Action
    sources: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    by: Rename | Stack | Unstack | Map | Pad | Literal["keep"] | None = None
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
        """Whether it is possible and admitted."""
        return self.is_admitted and not self.problem

    @property
    def change(self) -> LeafChange:
        """The same as a `LeafChange` of surgery, with the name as its path."""
        note = self.problem or self.note
        return LeafChange(self.action, self.leaf.name, self.leaf.description, self.sources, note)


@dataclasses.dataclass(frozen=True)
class Plan(Generic[_Target]):
    """What a restore would do with every leaf; nothing has been read or changed yet.

    Prints as a summary and the leaves that are not kept; `table()` has all of them.

    Attributes:
      rows: one per leaf of the target.
      dropped: the leaves of the checkpoint that are not used.
      changes: how the optimizer differs from the saved one.
      problems: what is wrong apart from single leaves.
      allow: the admitted kinds.
      source: where leaves are read from.
      target: what is restored, as given.
      view: the target as the planner sees it.
      suggestions: transformations that may have been renamed, with the rule to say so.
    """

    rows: tuple[Row, ...]
    dropped: tuple[Row, ...]
    changes: tuple[str, ...]
    problems: tuple[str, ...]
    allow: frozenset[str]
    source: Source = dataclasses.field(repr=False, compare=False)
    target: _Target = dataclasses.field(repr=False, compare=False)
    view: View = dataclasses.field(repr=False, compare=False)
    suggestions: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether `apply` would carry it out."""
        leaves = all(row.is_ok for row in self._all)
        return leaves and not self.problems and not self._refused_changes

    @property
    def is_exact(self) -> bool:
        """Whether every leaf is kept without a remark, and the optimizer is the same.

        Settings may differ that no leaf of the state depends on, such as a learning rate.
        """
        is_kept = all(row.action == "kept" and not row.note for row in self._all)
        return is_kept and self.is_ok and not self.changes

    @property
    def report(self) -> ChangeReport:
        """What becomes of the leaves of the state, as surgery reports it; without parameters."""
        return ChangeReport(tuple(row.change for row in self._all if row.leaf.transformation))

    @property
    def _all(self) -> tuple[Row, ...]:
        return *self.rows, *self.dropped

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the plan is refused, in few lines; empty if it is not.

        The problems, the changes that are not admitted, and for each kind of refused leaf the first
        one and their number.
        """
        alike: dict[tuple[str, str], list[Row]] = {}
        for row in self._all:
            if not row.is_ok:
                alike.setdefault((row.leaf.transformation, row.action), []).append(row)
        refused = self.changes if self._refused_changes else ()
        leaves = []
        for (_, action), rows in alike.items():
            first = rows[0].leaf.name
            why = rows[0].problem or rows[0].note
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            leaves.append(f"`{first}`{more} would be {action}{f': {why}' if why else ''}")
        return *self.problems, *refused, *leaves

    @property
    def missing_kinds(self) -> frozenset[str]:
        """What must be added to `allow` for everything that is possible at all."""
        kinds = {kind for row in self._all if not row.is_admitted for kind in row.kinds}
        kinds |= {"optimizer"} if self._refused_changes else set()
        return frozenset(kinds & KINDS) - self.allow

    @property
    def _refused_changes(self) -> bool:
        return bool(self.changes) and "optimizer" not in self.allow

    def check(self) -> Plan[_Target]:
        """Returns the plan itself.

        Raises:
          PlanError: it is impossible or not admitted; its text is the plan.
        """
        if self.is_ok:
            return self
        count = sum(not row.is_ok for row in self._all)
        head = "the checkpoint does not fit the optimizer as it is"
        if count:
            head += f": {count} {'leaf' if count == 1 else 'leaves'}"
        listed = ", ".join(f"'{kind}'" for kind in sorted(self.missing_kinds))
        kinds = f"`allow={{{listed}}}`"
        single = any(not row.is_admitted for row in self._all)
        rules = ", or `rules=` for single leaves" if single else ""
        advice = f"If this is intended, admit it: {kinds}{rules}."
        if self.problems or any(row.problem for row in self._all):
            also = f" {kinds} is needed too." if self.missing_kinds else ""
            advice = f"No `allow` admits all of that: correct what is wrong first.{also}"
        raise PlanError(f"{head}\n{self}\n{advice}", self)

    def apply(self) -> _Target:
        """Reads the leaves that are used and returns the restored target, of the given kind.

        Every leaf has the target's shape, dtype and sharding; where the target has no sharding,
        that of `placement=`, or else that of the checkpoint. Nothing is shared with the target or
        the checkpoint, so the result can be donated; only fields that a subclass of `TrainState`
        adds are the target's own. The target is not changed, nor is a model of NNX.

        Raises:
          PlanError: the plan is impossible or not admitted.
          DamagedError: a leaf in the checkpoint has changed since it was written.
          LeafError: a value does not fit the dtype that it is cast to; or a leaf was on several
            devices that are not here, and neither the target nor `placement=` says where it goes.
            Says which leaf.
        """
        from opt_checkpoint._planning.apply import apply_plan

        restored: _Target = self.view.put_back(*apply_plan(self.check()))
        return restored

    def rounding(self, restored: _Target) -> dict[str, float]:
        """Returns how much values changed that are stored in other digits than they were saved in.

        Reads the leaves in question again, one by one; `apply` itself costs nothing more.

        Args:
          restored: what `apply` returned, before it is donated.

        Returns:
          For the name of each such leaf the largest change of an element, relative to the largest
          finite element of the saved leaf, both in float32. Leaves that rules make are not among
          them.
        """
        from opt_checkpoint._planning.apply import rounding

        return rounding(self, restored)

    def diff(self) -> str:
        """Returns a line for each leaf that is not kept.

        `+` is initialised, `-` dropped, `~` renamed or converted, `=` kept although a rule matches
        it or with a remark; `!` marks what is impossible or not admitted.
        """
        return "\n".join(self._diff())

    def _diff(self) -> Iterator[str]:
        for row in self._all:
            is_ruled = row.by is not None and row.leaf.parameter is not None
            if row.action != "kept" or not row.is_ok or is_ruled or row.note:
                mark = " " if row.is_ok else "!"
                yield f"{mark}{_SIGNS[row.action]} {row.leaf.name} {shown(row.leaf)}{_text(row)}"

    def table(self) -> str:
        """Returns a line for every leaf of the target, then for the dropped ones."""
        lines = [("leaf", "shape", "dtype", "action", "from", "note")]
        for row in self._all:
            done = row.action if row.is_ok else f"{row.action} (refused)"
            leaf = row.leaf.name, str(list(row.leaf.shape)), row.leaf.dtype
            lines.append((*leaf, done, _sources(row), row.problem or row.note))
        return "\n".join([*aligned(lines, "<<<<<<"), self.summary()])

    def summary(self) -> str:
        """Returns one line: the number of leaves and bytes per action."""
        parts = []
        for action in get_args(Action):
            leaves = [row.leaf for row in self._all if row.action == action]
            if leaves or action == "kept":
                parts.append(f"{len(leaves)} {action} ({sum(map(leaf_bytes, leaves)):,} bytes)")
        return ", ".join(parts)

    def to_data(self) -> dict[str, Any]:
        """Returns the plan as JSON data."""
        return {
            "is_ok": self.is_ok,
            "rows": [_row_data(row) for row in self.rows],
            "dropped": [_row_data(row) for row in self.dropped],
            "changes": list(self.changes),
            "problems": list(self.problems),
            "reasons": list(self.reasons),
            "suggestions": list(self.suggestions),
            "allow": sorted(self.allow),
        }

    def __str__(self) -> str:
        lines = list(self._diff())
        # refused leaves come first, and are never cut off
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


def aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yields the lines of a table; `sides` aligns columns: `<` to the left, `>` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in columns).rstrip()


def leaf_bytes(leaf: LeafInfo) -> int:
    """Returns the size of a leaf in bytes; of typed PRNG keys, that of their data.

    A Python scalar has none: it is in the manifest.
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


def _text(row: Row) -> str:
    is_moved = row.sources and row.action in ("renamed", "converted")
    why = row.problem or row.note
    return f"{f' <- {_sources(row)}' if is_moved else ''}{f': {why}' if why else ''}"


def _sources(row: Row) -> str:
    if len(row.sources) > 2:
        return f"{row.sources[0]} .. {row.sources[-1]} ({len(row.sources)})"
    where = ""
    if row.index is not None:
        where = f"[{', '.join([*[':'] * row.axis, str(row.index)])}]"
    return ", ".join(row.sources) + where
