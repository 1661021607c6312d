"""Which leaf of a checkpoint becomes which leaf of an optimizer."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from opt_core._describe import describe_state
from opt_core._description import TransformationDescription, TransformationKey
from opt_core._plan.apply import unlike_initial, with_placement
from opt_core._plan.leaves import (
    LeafInfo,
    NamedState,
    Source,
    View,
    named_view,
    state_path,
)
from opt_core._plan.pairing import (
    STEP,
    Pair,
    Pairing,
    Side,
    frozen,
    is_concatenated,
    source_side,
)
from opt_core._plan.plan import Plan, Problem, Request, Row, fitted
from opt_core._plan.policy import (
    Move,
    begins_untrained,
    is_trained,
    problems,
    setting_notes,
    structural_notes,
)
from opt_core._plan.rules import Action, Pad, Rename, Sliced, Taking, sources_of
from opt_core._plan.stored import plain_sides, with_ways
from opt_core._plan.values import RuledRows
from opt_core._trees import Names, path_str, split_path


def make_plan(source: Source, view: View, request: Request, placement: Any = None) -> Plan[Any]:
    """Returns what becomes of every leaf of a source in a target; see `plan_restore`."""
    view = with_placement(view, placement)
    named = named_view(view)
    if any(leaf.stored for leaf in (*source.schema.leaves, *named.schema.leaves)):
        source, view = plain_sides(source, view, named, request)
        named = named_view(view)
    matcher = _Matcher(source, view, named, request)
    rows, move = matcher.rows()
    if view.stored is not None:
        rows = with_ways(rows, source, view.stored, request)
    _check_rules(request, rows, source)
    obstacles = [*problems(move), *(Problem(text, "optimizer") for text in matcher.pairing.unclear)]
    if source.schema.optimizer is None:  # transformations cannot be compared, only leaves
        obstacles = [problem for problem in obstacles if problem.needs is None]
    new = {move.new.names[p.new]: p.text for p in obstacles if p.new is not None}
    old = {move.old.names[p.old]: p.text for p in obstacles if p.old is not None}
    rows = [_with_problem(row, new, "initialise it by a rule") for row in rows]
    dropped = matcher.dropped(rows, move)
    rows += [_with_problem(row, old, "drop it by a rule") for row in dropped]
    changes = [p for p in obstacles if p.old is None and p.new is None]
    refused = [p for p in changes if p.needs is None or p.needs not in request.allow]
    admitted = [p.text for p in changes if p not in refused]
    structural = [] if source.schema.optimizer is None else [*structural_notes(move)]
    said = {problem.setting for problem in changes}
    settings = [text for setting, text in setting_notes(move) if setting not in said]
    return Plan(
        rows=tuple(rows),
        refused_changes=tuple(refused),
        notes=tuple(dict.fromkeys((*admitted, *structural, *settings, *suggested_renames(move)))),
        is_same_optimizer=not structural and not changes,
        allow=request.allow,
        source=source,
        view=view,
        error=request.error,
    )


def _with_problem(row: Row, texts: Mapping[str, str], advice: str) -> Row:
    if row.problem or row.leaf.name not in texts:
        return row
    return dataclasses.replace(row, problem=f"{texts[row.leaf.name]}, or {advice}")


class _Matcher:
    """One walk over the leaves of a target."""

    def __init__(self, source: Source, view: View, named: NamedState, request: Request) -> None:
        self.source, self.named, self.request = source, named, request
        schema = self.named.schema
        self.saved = {leaf.name: leaf for leaf in source.schema.leaves if leaf.kind != "extra"}
        self._view = view
        self.origins = dict(self._origins())
        leaves = [leaf for leaf in schema.leaves if leaf.transformation]
        self.old = source_side(source, schema)
        described = describe_state(view.optimizer)
        paths = [leaf.path for leaf in described.leaves]
        self.new = Side(self.named, leaves, described.transformations, paths, self.origins)
        self._by_rule = {
            leaf.name: row for leaf in schema.leaves if (row := self._row_by_rule(leaf)) is not None
        }
        self._places = {leaf.name: i for i, leaf in enumerate(self.old.leaves)}
        ruled = {
            j: [self._places[name] for name in row.sources if name in self._places]
            for j, leaf in enumerate(leaves)
            if (row := self._by_rule.get(leaf.name)) is not None
        }
        self.pairing = Pairing(self.old, self.new, ruled)
        self.pairs = self.pairing.pairs
        if request.schedules == "restart":
            self.pairs = _restarted(self.old, self.new, self.pairs)

    @functools.cached_property
    def ruled(self) -> RuledRows:
        """The rows of leaves that a rule makes."""
        schema = self.named.schema
        unlike_init = functools.partial(unlike_initial, self._view, schema)
        return RuledRows(self.source.schema, schema, self.request, unlike_init)

    def _origins(self) -> Iterator[tuple[Names, list[Names]]]:
        """The parameters of the checkpoint that each of the target's comes from."""
        for leaf in self.named.schema.leaves:
            if leaf.kind == "params":
                rule = self.request.rule(leaf.name)
                names: tuple[str, ...] = (leaf.name,)
                if rule is not None and isinstance(rule[1], Taking):
                    names = sources_of(rule[1], rule[2], leaf.shape)
                yield leaf.path[1:], [split_path(n)[1:] for n in names if n in self.saved]

    def rows(self) -> tuple[list[Row], Move]:
        """What becomes of every leaf of the target; the policy sees it as a `Move`."""
        rows, pairs = [], iter(self.pairs)
        for leaf in self.named.schema.leaves:
            pair = next(pairs) if leaf.transformation else None
            row = self._by_rule.get(leaf.name)
            if row is None:
                row = self._by_name(leaf) if pair is None else self._paired(leaf, pair)
            elif pair is not None and pair.note:
                row = dataclasses.replace(row, note=", ".join(filter(None, (row.note, pair.note))))
            rows.append(row)
        rows = list(self._refuse_fresh_counts(rows))
        # Which new leaves begin where training has gone on is known once all are paired.
        move, of_state = self._move(rows), iter(range(len(rows)))
        return [
            self._require_initialise(row, move, next(of_state)) if row.leaf.transformation else row
            for row in rows
        ], move

    def _require_initialise(self, row: Row, move: Move, j: int) -> Row:
        """A row of a state with what has to be admitted for a leaf that `init` makes."""
        if row.action != "initialised" or not begins_untrained(move, j):
            return row
        note = row.note or move.at_a_count.get(row.leaf.kept_by, "")
        is_admitted = "initialise" in self.request.allow
        return dataclasses.replace(row, kinds=("initialise",), note=note, is_admitted=is_admitted)

    def _move(self, rows: Sequence[Row]) -> Move:
        """Which leaf comes from which, as the policy sees it."""
        of_state = [row for row in rows if row.leaf.transformation]
        sources = [
            tuple(self._places[name] for name in row.sources if name in self._places)
            for row in of_state
        ]
        ruled = {
            j
            for j, row in enumerate(of_state)
            if (row.by is not None and (row.sources or not isinstance(row.by, Pad)))
            or self._is_fresh(row.leaf.name)
        }
        let_go = {
            i
            for i, leaf in enumerate(self.old.leaves)
            if self.request.rule(leaf.name, drop=True) is not None
            or (leaf.parameter is not None and self._lets_go(leaf.name))
        }
        idle = frozen(self.named.schema)
        trained = {
            o for param, origins in self.origins.items() if param not in idle for o in origins
        }
        gone = {leaf.parameter for leaf in self.old.leaves if leaf.parameter is not None} - trained
        discards_state = self.request.discards_state
        return Move(self.old, self.new, sources, ruled, let_go, gone, discards_state)

    def _action(self, name: str) -> Action | None:
        """The action of the rule for a leaf of the target, if any."""
        rule = self.request.rule(name)
        return None if rule is None else rule[1]

    def _is_fresh(self, name: str) -> bool:
        """Whether a rule says that a leaf of the target does not come from the checkpoint."""
        return name in self.request.reset or self._action(name) in ("initialise", "keep")

    def _lets_go(self, name: str) -> bool:
        """Whether a rule lets go a leaf of the source by what it says of its namesake."""
        return name in self.named.schema.by_name and self._action(name) in ("initialise", "keep")

    def _refuse_fresh_counts(self, rows: Sequence[Row]) -> Iterator[Row]:
        """Refuses to reinitialise a count whose moments are kept by rules."""
        ruled: dict[TransformationKey, str] = {}
        fresh = self.pairing.reinitialised
        for row in rows:
            if row.leaf.parameter is not None and row.by is not None:
                ruled.setdefault(row.leaf.kept_by, row.leaf.name)
        for row in rows:
            where = row.leaf.kept_by
            is_count = row.action == "initialised" and row.leaf.parameter is None
            is_free = row.problem or self._is_fresh(row.leaf.name)
            if is_count and not is_free and where in fresh and where in ruled:
                problem = f"{row.note}, while a rule keeps `{ruled[where]}`: give this a rule too"
                row = dataclasses.replace(row, problem=problem)
            yield row

    def _row_by_rule(self, leaf: LeafInfo) -> Row | None:
        """The row of a leaf whose source a rule states."""
        rule = self.request.rule(leaf.name)
        if leaf.name in self.request.reset:
            return self._initialised(leaf, "")
        if rule is None:
            return None
        _, action, match = rule
        if action == "initialise":
            return self._initialised(leaf, "as a rule says", is_ruled=True)
        if action == "keep":
            is_missing = _is_abstract(self.named[leaf.name])
            problem = "the target gives no value to keep" if is_missing else ""
            note = "the target's own, as a rule says"
            return Row(leaf, "initialised", by="keep", note=note, problem=problem)
        if isinstance(action, Taking):
            return self.ruled.taken(leaf, action, match)
        return None

    def _by_name(self, leaf: LeafInfo) -> Row:
        """The row of a parameter, or of the step."""
        if leaf.name not in self.saved:
            return self._initialised(leaf, "")
        return self._fitted(leaf, [self.saved[leaf.name]], (), "")

    def _paired(self, leaf: LeafInfo, pair: Pair) -> Row:
        sources = [self.old.leaves[i] for i in pair.sources]
        if pair.counts is not None:
            name = "state/step" if pair.counts == STEP else self.old.names[pair.counts]
            if name in self.saved and self.saved[name].shape == leaf.shape:
                why = f" ({pair.note})" if pair.note else ""
                note = f"a new count, which continues from `{name}`{why}"
                return fitted(leaf, [self.saved[name]], (), note, self.request.allow)
        if not sources and pair.lookalike is not None:
            like = self.old.leaves[pair.lookalike]
            had, kept = self.ruled.had.shapes, self.ruled.kept.shapes
            is_same = had.get(like.parameter) == kept.get(leaf.parameter)
            if not is_same or isinstance(self._action(leaf.name), Pad):
                return self._fitted(leaf, [like], (), "")
            return self._initialised(leaf, self._why_not_carried(leaf, like) or pair.note)
        if not sources:
            return self._initialised(leaf, pair.note)
        is_numbered = sources[0].group == leaf.group and sources[0].name != leaf.name
        is_moved = [source.name for source in sources] != [leaf.name] and not is_numbered
        kinds = ("regroup",) * is_moved
        notes = [pair.note] if pair.note else []
        if len(sources) > 1:
            notes.insert(0, "the groups agree")
        return self._fitted(leaf, sources, kinds, ", ".join(notes))

    def _fitted(
        self, leaf: LeafInfo, sources: Sequence[LeafInfo], kinds: tuple[str, ...], note: str
    ) -> Row:
        """The row of a leaf that comes from one of the checkpoint, or from several that agree."""
        action = self._action(leaf.name)
        if isinstance(action, Pad):
            row = self.ruled.padded(leaf, action, sources[0], kinds, note)
            is_own = row.sources == (sources[0].name,)
            names = tuple(source.name for source in sources)
            return dataclasses.replace(row, sources=names) if is_own else row
        if why := self._why_not_carried(leaf, sources[0]):
            return self._initialised(leaf, why)
        allow = self.request.allow | ({action} if isinstance(action, str) else set())
        return fitted(leaf, sources, kinds, note, allow)

    def _initialised(self, leaf: LeafInfo, note: str, *, is_ruled: bool = False) -> Row:
        """The row of a leaf that `init` makes; for states see `_require_initialise`."""
        kinds = () if leaf.transformation else ("initialise",)
        admitted = is_ruled or {*kinds} <= self.request.allow
        is_missing = leaf.kind == "params" and _is_abstract(self.named[leaf.name])
        problem = "the checkpoint lacks it: give arrays for new parameters" if is_missing else ""
        return Row(
            leaf, "initialised", kinds=kinds, note=note, problem=problem, is_admitted=admitted
        )

    def _why_not_carried(self, leaf: LeafInfo, source: LeafInfo) -> str:
        """Why a leaf is not that of the same name if a rule makes its parameter; empty if it is."""
        # A moment may still fit the shape of its parameter, but not its values.
        if leaf.transformation and is_concatenated(leaf):
            for param in self.named.schema.leaves:
                action = self._action(param.name) if param.kind == "params" else None
                if action is not None and not isinstance(action, str | Rename):
                    what = f"a `{type(action).__name__}` makes `{param.name}`"
                    return f"{what}, and this concatenates parameters"
        if leaf.kind != "state" or leaf.parameter is None:
            return ""
        name = path_str(("params", *leaf.parameter))
        action = self._action(name)
        if action is None or isinstance(action, str):
            return ""
        if isinstance(action, Pad):
            return self.ruled.unpadded(leaf, action, source)
        if isinstance(action, Rename) and self.origins.get(leaf.parameter) == [source.parameter]:
            return ""
        return f"a `{type(action).__name__}` makes `{name}`, and no rule says what this becomes"

    def dropped(self, rows: Sequence[Row], move: Move) -> list[Row]:
        """The leaves of the source, and slices of leaves, that are not used."""
        used = {name for row in rows for name in row.sources}
        unused = []
        for leaf in self.saved.values():
            if leaf.name in used:
                continue
            i = self._places.get(leaf.name)
            is_free = i is not None and not is_trained(move.old, i)
            is_let_go = leaf.name in self.request.reset or self._lets_go(leaf.name)
            note = _EVALUATED.get(leaf.kept_by.name, "") if leaf.role == "params_copy" else ""
            unused.append(self._dropped_row(leaf, leaf.name, note, is_free=is_free or is_let_go))
        return [*unused, *self._unused_slices(rows)]

    def _dropped_row(
        self, leaf: LeafInfo, name: str, note: str = "", *, is_free: bool = False
    ) -> Row:
        by_rule = self.request.rule(name, drop=True) is not None
        admitted = is_free or by_rule or "drop" in self.request.allow
        kinds = () if is_free else ("drop",)
        return Row(leaf, "dropped", kinds=kinds, note=note, is_admitted=admitted)

    def _unused_slices(self, rows: Sequence[Row]) -> Iterator[Row]:
        taken: dict[tuple[str, int], set[int]] = {}
        unsliced = {name for row in rows if not isinstance(row.how, Sliced) for name in row.sources}
        for row in rows:
            if isinstance(row.how, Sliced) and row.sources[0] not in unsliced:
                taken.setdefault((row.sources[0], row.how.axis), set()).add(row.how.index)
        for (name, axis), indices in taken.items():
            leaf = self.saved[name]
            shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
            for index in sorted(set(range(leaf.shape[axis])) - indices):
                path = (*leaf.path[:-1], f"{leaf.path[-1]}{Sliced('stack', axis, index)}")
                yield self._dropped_row(dataclasses.replace(leaf, path=path, shape=shape), name)


_EVALUATED: Final = {
    "schedule_free": "the parameters to evaluate are computed from it, and are not those that are "
    "kept; a `Map` of `params`, `z` and `b1` restores them",
    "with_average": "the average; a `Rename` of `params` to it restores it as the parameters",
}


def _is_abstract(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)


def _restarted(old: Side, new: Side, pairs: Sequence[Pair]) -> list[Pair]:
    """Removes the counts of schedules, except in groups that are the same."""

    def of(side: Side, group: Names) -> Any:
        params = {param for param, owner in side.owners.items() if owner[: len(group)] == group}
        return params, [x for x in side.transformations if x.group == group]

    groups = {leaf.group for leaf in new.leaves if leaf.role == "schedule_count"}
    same = {group for group in groups if of(old, group) == of(new, group)}
    return [
        Pair(note="restarts") if leaf.role == "schedule_count" and leaf.group not in same else pair
        for pair, leaf in zip(pairs, new.leaves, strict=True)
    ]


def _check_rules(request: Request, rows: Sequence[Row], source: Source) -> None:
    """Raises a `ValueError` for a rule that matches nothing."""
    names = [row.leaf.name for row in rows]
    saved = [leaf.name for leaf in source.schema.leaves]
    for pattern, action in request.rules:
        where = saved if action == "drop" else names
        if not any(pattern.fullmatch(name) for name in where):
            side = "checkpoint" if action == "drop" else "target"
            raise ValueError(
                f"`rules`: {pattern.pattern!r} matches no leaf of the {side}, which has names like "
                f"{', '.join(f'`{name}`' for name in where[:3])}"
            )


def suggested_renames(move: Move) -> Iterator[str]:
    """Yields the `Rename` that would keep a state instead of dropping and initialising it."""
    # Only if exactly one removed and one new transformation agree in fields, shapes and parameters.
    # Two known transformations are not the same: Adam's moments are not Adamax's.
    initial = {j for j, sources in enumerate(move.sources) if not sources and j not in move.ruled}
    gone, new = _looks(move.old, move.dropped), _looks(move.new, initial)
    for after, look in new.items():
        like = [old for old, other in gone.items() if other == look and old.group == after.group]
        is_one = len(like) == 1 and [*new.values()].count(look) == 1
        is_renamed = is_one and (like[0].name, like[0].number) != (after.name, after.number)
        if is_renamed and "stated" not in (like[0].source, after.source):
            yield _suggestion(like[0], after)


def _looks(side: Side, chosen: Collection[int]) -> Mapping[TransformationDescription, Any]:
    """Fields, parameters and shapes of the transformations of which all leaves are chosen."""
    by_transformation = {}
    for transformation in side.transformations:
        own = side.leaves_of(transformation.key)
        if own and all(i in chosen for i in own):
            looks = (
                (side.leaves[i].field, side.leaves[i].parameter, side.leaves[i].shape) for i in own
            )
            by_transformation[transformation] = frozenset(looks)
    return by_transformation


def _suggestion(old: TransformationDescription, new: TransformationDescription) -> str:
    was, now = state_path(old.key), state_path(new.key)
    pattern = re.escape(path_str(now)).replace("\\#", "#") + "/(.*)"
    source = path_str(was).replace("\\", "\\\\") + "/\\1"
    return (
        f"`{now[-1]}` may be the former `{was[-1]}`: their states look the same. If so, say: "
        f"`rules=[(r'{pattern}', Rename(r'{source}'))]`"
    )
