"""What becomes of every leaf of a state, as printable data."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import jax.numpy as jnp

from opt_core._description import TransformationKey
from opt_core._plan.leaves import LeafInfo, Source, View, shown
from opt_core._plan.rules import (
    Action,
    Conversion,
    Map,
    Pad,
    Rule,
    Sliced,
    Taking,
    compiled,
    function_name,
)
from opt_core._trees import aligned
from opt_core.errors import GroupError, SurgeryError

Allowance: TypeAlias = Literal["initialise", "drop", "cast", "reshape", "regroup", "optimizer"]
"""A word of `allow=`: a change that the caller admits.

`initialise`: state that restarts where training has gone on, or a parameter that the source lacks.
`drop`: trained state, or a parameter, without a successor. `cast`: another dtype, if every value
fits. `reshape`: another shape of the same size. `regroup`: a leaf whose parameter is in another
group, which is always admitted. `optimizer`: moments that go on under other mathematics.
"""

KINDS: Final = frozenset(get_args(Allowance))
FREE: Final = frozenset({"regroup"})
"""What needs no leave, and is a word all the same."""


def check_allowances(allow: Iterable[str]) -> frozenset[str]:
    """Returns the allowed changes as a set."""
    if isinstance(allow, str):
        raise TypeError(
            f"`allow` must be a set of words; found the string {allow!r}: give `{{{allow!r}}}`"
        )
    if unknown := sorted(frozenset(allow) - KINDS):
        raise ValueError(f"`allow`: expected words among {sorted(KINDS)}, found {unknown}")
    return frozenset(allow)


Schedules: TypeAlias = Literal["continue", "restart"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What the caller of a door says besides source and target."""

    allow: frozenset[str]  # the changes that are admitted
    # patterns (regular expressions that match a whole name) with actions for single leaves; the
    # first that matches decides
    rules: tuple[tuple[re.Pattern[str], Action], ...] = ()
    # whether new schedules continue from the step, or restart at 0
    schedules: Schedules = "continue"
    reset: Collection[str] = frozenset()  # names of leaves that the caller has asked to initialise
    discards_state: bool = False  # whether the caller has asked to discard the state of parameters
    error: type[SurgeryError] = SurgeryError  # what a refused plan raises

    @classmethod
    def make(
        cls,
        allow: Iterable[str],
        rules: Sequence[Rule] = (),
        schedules: Schedules = "continue",
        **settings: Any,
    ) -> Request:
        """Checks and compiles."""
        if schedules not in get_args(Schedules):
            raise GroupError(f"`schedules` must be 'continue' or 'restart', found {schedules!r}")
        if not isinstance(rules, Iterable):
            raise TypeError(f"`rules`: expected pairs of a pattern and an action, found {rules!r}")
        return cls(check_allowances(allow), tuple(map(compiled, rules)), schedules, **settings)

    def rule(self, name: str, *, drop: bool = False) -> tuple[int, Action, re.Match[str]] | None:
        """The first rule for a name of the target, or, with `drop`, of the checkpoint."""
        for i, (pattern, action) in enumerate(self.rules):
            match = pattern.fullmatch(name) if (action == "drop") == drop else None
            if match is not None:
                return i, action, match
        return None


Outcome: TypeAlias = Literal["kept", "renamed", "converted", "initialised", "dropped"]
"""What becomes of a leaf; see `Row`."""

_LISTED = 40
_SIGNS: Final = dict(zip(get_args(Outcome), "=~~+-", strict=True))
_Target = TypeVar("_Target")


@dataclasses.dataclass(frozen=True)
class Row:
    """What becomes of one leaf, and how.

    Attributes:
      leaf: of the target; of one that is dropped, of the checkpoint.
      action: `'kept'`: unchanged. `'renamed'`: unchanged, from another name. `'converted'`:
        computed from leaves of the checkpoint. `'initialised'`: new, or the target's own.
        `'dropped'`: not used.
      sources: the names in the checkpoint that it comes from.
      kinds: what is done with it, words of `allow=`; and `'rename'`, `'stack'`, `'map'` or
        `'pad'` if a rule does that. Empty for leaves that are kept.
      by: the action of its rule, if any; `'keep'` for the target's own value.
      how: what a rule other than `Rename` does with the values.
      note: the reason, as text.
      problem: why it is impossible; empty if it is not.
      is_admitted: whether `allow` or a rule admits it.
    """

    leaf: LeafInfo
    action: Outcome
    sources: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    by: Taking | Pad | Literal["keep"] | None = None
    how: Conversion | None = None
    note: str = ""
    problem: str = ""
    is_admitted: bool = True

    @property
    def is_ok(self) -> bool:
        """Whether it is possible and admitted."""
        return self.is_admitted and not self.problem


Setting: TypeAlias = tuple[TransformationKey, str]


class Problem(NamedTuple):
    """Something that stands in the way."""

    text: str  # what, and why
    needs: Allowance | None = None  # the word of `allow` that admits it; `None` if none does
    old: str | None = None  # the name of the old leaf that would be lost, if it is one
    new: str | None = None  # the name of the new leaf that would be incomplete, if it is one
    # the transformation and the name of the setting that has changed, if it is one
    setting: Setting | None = None

    def __str__(self) -> str:
        return _with_words(self.text, [] if self.needs is None else [self.needs])


@dataclasses.dataclass(frozen=True)
class Plan(Generic[_Target]):
    """What becomes of every leaf; nothing has been read or changed yet.

    Prints as a summary, what stands in the way, and the leaves that are not kept; `table()` has all
    of them.

    Attributes:
      rows: one per leaf of the target, then those of the source that are not used.
      refused_changes: changes of the optimizer as a whole that are not admitted.
      notes: changes of the optimizer that are reported or admitted.
      is_same_optimizer: whether nothing but settings is different on which no leaf depends.
      allow: the admitted kinds.
      source: where leaves are read from.
      view: the target as the planner sees it.
      error: what `apply` raises for a plan that is refused.
    """

    rows: tuple[Row, ...]
    refused_changes: tuple[Problem, ...]
    notes: tuple[str, ...]
    is_same_optimizer: bool
    allow: frozenset[str]
    source: Source = dataclasses.field(repr=False, compare=False)
    view: View = dataclasses.field(repr=False, compare=False)
    error: type[SurgeryError] = dataclasses.field(repr=False, compare=False)

    @property
    def is_ok(self) -> bool:
        """Whether `apply` would carry it out."""
        return not self.refused_changes and all(row.is_ok for row in self.rows)

    @property
    def is_exact(self) -> bool:
        """Whether every leaf is kept without a remark, and the optimizer is the same.

        Settings may differ that no leaf of the state depends on, such as a learning rate.
        """
        is_kept = all(row.action == "kept" and not row.note for row in self.rows)
        return is_kept and self.is_ok and self.is_same_optimizer

    @functools.cached_property
    def target_rows(self) -> tuple[Row, ...]:
        """The rows of the target, in the order of its leaves."""
        return tuple(row for row in self.rows if row.action != "dropped")

    def names(self, action: Outcome) -> tuple[str, ...]:
        """Returns the names of the leaves with an action."""
        return tuple(row.leaf.name for row in self.rows if row.action == action)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of leaves that are the same, with the same value."""
        return self.names("kept")

    @property
    def renamed(self) -> tuple[str, ...]:
        """Names in the target of leaves that are the same under another name."""
        return self.names("renamed")

    @property
    def converted(self) -> tuple[str, ...]:
        """Names in the target of leaves that are computed from others, or have another form."""
        return self.names("converted")

    @property
    def initialised(self) -> tuple[str, ...]:
        """Names in the target of leaves that `init` makes, or that keep the target's own value."""
        return self.names("initialised")

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names in the source of leaves that are not used."""
        return self.names("dropped")

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the plan is refused, with the word of `allow` that helps; empty if it is not.

        Of leaves that are refused for one reason the first one, and their number.
        """
        changes = list(map(str, self.refused_changes))
        alike: dict[Any, list[Row]] = {}
        for row in self.rows:
            if not row.is_ok:
                key = row.leaf.transformation, row.action, row.problem or row.kinds
                alike.setdefault(key, []).append(row)
        leaves = []
        for rows in alike.values():
            first = rows[0]
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            why = first.problem or first.note
            text = f"`{first.leaf.name}`{more} would be {first.action}{f': {why}' if why else ''}"
            leaves.append(_with_words(text, [] if first.problem else self._missing([first])))
        return *changes, *leaves

    @property
    def missing_words(self) -> frozenset[str]:
        """What must be added to `allow` for everything that is possible at all."""
        words = {problem.needs for problem in self.refused_changes if problem.needs is not None}
        return self._missing(self.rows) | words

    def _missing(self, rows: Iterable[Row]) -> frozenset[str]:
        words = {kind for row in rows if not row.is_admitted for kind in row.kinds}
        return frozenset(words & KINDS) - self.allow - FREE

    def check(self) -> Plan[_Target]:
        """Returns the plan itself.

        Raises:
          SurgeryError: it is impossible or not admitted; its text is the plan.
        """
        if self.is_ok:
            return self
        words = ", ".join(f"'{word}'" for word in sorted(self.missing_words))
        is_possible = all(problem.needs is not None for problem in self.refused_changes)
        is_possible &= not any(row.problem for row in self.rows)
        advice = f"If this is intended, pass `allow={{{words}}}`"
        if any(not row.is_admitted for row in self.rows):
            advice += ", or `rules=` for single leaves"
        if not is_possible:
            also = f", and pass `allow={{{words}}}`" if words else ""
            advice = f"No `allow` admits all of that: correct what is wrong first{also}"
        count = sum(not row.is_ok for row in self.rows)
        leaves = f": {count} {'leaf' if count == 1 else 'leaves'}" if count else ""
        raise self.error(f"the state does not fit the optimizer{leaves}\n{self}\n{advice}.", self)

    def apply(self) -> _Target:
        """Reads the leaves that are used and returns the target with them, of the same kind.

        Every leaf has the target's shape, dtype and sharding; where the target has no sharding,
        that of `placement=`, or else that of the source. What is restored shares no buffer with
        target or checkpoint, so it can be donated; only fields that a subclass of `TrainState` adds
        are the target's own. Surgery hands leaves over as they are. The target is not changed, nor
        is a model of NNX.

        Raises:
          SurgeryError: the plan is impossible or not admitted; of a restore, its `PlanError`.
          LeafError: a value does not fit the dtype that it is cast to; or a leaf was on several
            devices that are not here, and neither the target nor `placement=` says where it goes.
            Says which leaf.
        """
        from opt_core._plan.apply import apply_plan

        restored: _Target = self.view.put_back(*apply_plan(self.check()))
        return restored

    def _lines(self) -> Iterator[str]:
        """Lines of leaves that are not kept, or with a remark, or by a rule."""
        for row in self.rows:
            is_ruled = row.by is not None and row.leaf.parameter is not None
            if row.action != "kept" or not row.is_ok or is_ruled or row.note:
                mark = " " if row.is_ok else "!"
                yield f"{mark}{_SIGNS[row.action]} {row.leaf.name} {shown(row.leaf)}{_text(row)}"

    def table(self) -> str:
        """Returns a line for every leaf of the target, then for the dropped ones."""
        lines = [("leaf", "shape", "dtype", "action", "from", "note")]
        for row in self.rows:
            done = row.action if row.is_ok else f"{row.action} (refused)"
            leaf = row.leaf.name, str(list(row.leaf.shape)), row.leaf.dtype
            lines.append((*leaf, done, _sources(row), row.problem or row.note))
        return "\n".join([*aligned(lines, "<<<<<<"), self._summary()])

    def _summary(self) -> str:
        """One line: the number of leaves and bytes per action."""
        parts = []
        for action in get_args(Outcome):
            leaves = [row.leaf for row in self.rows if row.action == action]
            if leaves or action == "kept":
                parts.append(f"{len(leaves)} {action} ({sum(map(leaf_bytes, leaves)):,} bytes)")
        return ", ".join(parts)

    def to_data(self) -> dict[str, Any]:
        """Returns the plan as JSON data."""
        return {
            "is_ok": self.is_ok,
            "rows": [_row_data(row) for row in self.rows],
            "problems": list(self.problems),
            "notes": list(self.notes),
            "allow": sorted(self.allow),
        }

    def __str__(self) -> str:
        lines = list(self._lines())
        # Refused leaves come first, and are never cut off.
        lines.sort(key=lambda line: not line.startswith("!"))
        urgent = sum(line.startswith("!") for line in lines)
        count = max(_LISTED, urgent)
        if len(lines) > count:
            lines = [*lines[:count], f"... and {len(lines) - count} more: `table()` has all"]
        wrong = [f"!* {problem}" for problem in self.refused_changes]
        notes = [f" * {note}" for note in self.notes]
        return "\n".join([self._summary(), *wrong, *notes, *lines])


def fitted(
    leaf: LeafInfo,
    sources: Sequence[LeafInfo],
    kinds: tuple[str, ...],
    note: str,
    allow: frozenset[str],
    *,
    by: Taking | Pad | None = None,
    how: Conversion | None = None,
    dtype: str | None = None,
) -> Row:
    """Returns the row of a leaf that comes from another, from several that agree, or by `how`."""
    source, problem, notes = sources[0], "", [note]
    if how is None and source.shape != leaf.shape:
        if math.prod(source.shape) == math.prod(leaf.shape):
            kinds = (*kinds, "reshape")
            notes.append(f"{list(source.shape)} -> {list(leaf.shape)}")
        else:
            problem = f"expected {list(leaf.shape)}, found {list(source.shape)}"
    dtype = source.dtype if dtype is None else dtype
    casts, wrong = cast_kinds(dtype, leaf.dtype)
    if casts:
        notes.append(f"{dtype} -> {leaf.dtype}")
    kinds, problem = (*kinds, *casts), problem or wrong
    action: Outcome = "renamed" if kinds or source.name != leaf.name else "kept"
    if how is not None or problem or {"cast", "reshape"} & {*kinds}:
        action = "converted"
    free = FREE | ({"cast"} if _is_free_cast(leaf, dtype) else set())
    return Row(
        leaf,
        action,
        tuple(source.name for source in sources),
        kinds,
        by=by,
        how=how,
        note=", ".join(filter(None, notes)),
        problem=problem,
        is_admitted=KINDS & {*kinds} <= allow | free,
    )


def _is_free_cast(leaf: LeafInfo, source: str) -> bool:
    """Whether state that is computed from updates goes on in another float dtype."""
    dtypes = [source, leaf.dtype]
    if not leaf.transformation or any(x.startswith("key<") for x in dtypes):
        return False
    kinds = (jnp.floating, jnp.complexfloating)
    return any(all(jnp.issubdtype(jnp.dtype(x), kind) for x in dtypes) for kind in kinds)


def cast_kinds(source: str, leaf: str) -> tuple[tuple[str, ...], str]:
    """Returns what must be admitted for another dtype, and what makes it impossible."""
    if source == leaf:
        return (), ""
    wrong = f"expected {leaf}, found {source}"
    if source.startswith("key<") or leaf.startswith("key<"):
        return (), f"{wrong}: keys cannot be cast"
    old, new = jnp.dtype(source), jnp.dtype(leaf)
    is_complex = jnp.issubdtype(old, jnp.complexfloating)
    if is_complex and not jnp.issubdtype(new, jnp.complexfloating):
        return (), f"{wrong}: an imaginary part would be lost"
    return ("cast",), ""


def _with_words(text: str, words: Iterable[str]) -> str:
    asked = ", ".join(f"'{word}'" for word in words)
    return f"{text} (allow: {asked})" if asked else text


def leaf_bytes(leaf: LeafInfo) -> int:
    """Returns the size of a leaf in bytes; of typed PRNG keys, that of their data."""
    if leaf.dtype == "python":
        return 0
    size = 8 if leaf.is_key else jnp.dtype(leaf.dtype).itemsize
    return math.prod(leaf.shape) * size


def _row_data(row: Row) -> dict[str, Any]:
    how = None if row.how is None else row.how.word
    data = dataclasses.asdict(dataclasses.replace(row, how=None))
    data |= {"name": row.leaf.name, "how": how}
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
    return ", ".join(row.sources) + (str(row.how) if isinstance(row.how, Sliced) else "")
