"""Which leaf of a checkpoint becomes which leaf of an optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from opt_core._description import (
    TransformationKey,
    describe_state,
    dimensions_text,
    setting_text,
)
from opt_core._plan.apply import unlike_initial, with_placement
from opt_core._plan.leaves import (
    LeafInfo,
    NamedState,
    Side,
    Source,
    View,
    frozen,
    is_alike,
    is_concatenated,
    like_numbers,
    named_view,
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
    new = {p.new: p.text for p in obstacles if p.new is not None}
    old = {p.old: p.text for p in obstacles if p.old is not None}
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
        notes=tuple(dict.fromkeys((*admitted, *structural, *settings))),
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
        pairs = zip(leaves, described.leaves, strict=True)
        paths = {leaf.name: known.path for leaf, known in pairs}
        self.new = Side(self.named, leaves, described.transformations, paths, self.origins)
        self._by_rule = {
            leaf.name: row for leaf in schema.leaves if (row := self._row_by_rule(leaf)) is not None
        }
        ruled = {
            name: self._sources(row)
            for name, row in self._by_rule.items()
            if row.leaf.transformation
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

    def _sources(self, row: Row) -> tuple[LeafInfo, ...]:
        """The leaves of transformations that a row takes."""
        return tuple(self.old.leaves[name] for name in row.sources if name in self.old.leaves)

    def rows(self) -> tuple[list[Row], Move]:
        """What becomes of every leaf of the target; the policy sees it as a `Move`."""
        rows = []
        for leaf in self.named.schema.leaves:
            pair = self.pairs.get(leaf.name)
            row = self._by_rule.get(leaf.name)
            if row is None:
                row = self._by_name(leaf) if pair is None else self._paired(leaf, pair)
            elif pair is not None and pair.note:
                row = dataclasses.replace(row, note=", ".join(filter(None, (row.note, pair.note))))
            rows.append(row)
        rows = list(self._refuse_fresh_counts(rows))
        # Which new leaves begin where training has gone on is known once all are paired.
        move = self._move(rows)
        return [self._require_initialise(row, move) for row in rows], move

    def _require_initialise(self, row: Row, move: Move) -> Row:
        """A row of a state with what has to be admitted for a leaf that `init` makes."""
        is_new = bool(row.leaf.transformation) and row.action == "initialised"
        if not is_new or not begins_untrained(move, row.leaf):
            return row
        note = row.note or move.at_a_count.get(row.leaf.kept_by, "")
        is_admitted = "initialise" in self.request.allow
        return dataclasses.replace(row, kinds=("initialise",), note=note, is_admitted=is_admitted)

    def _move(self, rows: Sequence[Row]) -> Move:
        """Which leaf comes from which, as the policy sees it."""
        of_state = [row for row in rows if row.leaf.transformation]
        sources = {row.leaf.name: self._sources(row) for row in of_state}
        ruled = {
            row.leaf.name
            for row in of_state
            if (row.by is not None and (row.sources or not isinstance(row.by, Pad)))
            or self._is_fresh(row.leaf.name)
        }
        let_go = {
            name
            for name, leaf in self.old.leaves.items()
            if self.request.rule(name, drop=True) is not None
            or (leaf.parameter is not None and self._lets_go(name))
        }
        idle = frozen(self.named.schema)
        trained = {
            o for param, origins in self.origins.items() if param not in idle for o in origins
        }
        gone = {x.parameter for x in self.old.leaves.values() if x.parameter is not None} - trained
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
        sources, like = pair.sources, pair.lookalike
        counts = self.saved.get(pair.counts)
        if counts is not None and counts.shape == leaf.shape:
            why = f" ({pair.note})" if pair.note else ""
            note = f"a new count, which continues from `{counts.name}`{why}"
            return fitted(leaf, [counts], (), note, self.request.allow)
        if not sources and like is not None:
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
            of_state = self.old.leaves.get(leaf.name)
            is_free = of_state is not None and not is_trained(move.old, of_state)
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


def _restarted(old: Side, new: Side, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Removes the counts of schedules, except in groups that are the same."""

    def of(side: Side, group: Names) -> Any:
        params = {param for param, owner in side.owners.items() if owner[: len(group)] == group}
        return params, [x for x in side.transformations if x.group == group]

    counts = [leaf for leaf in new.leaves.values() if leaf.role == "schedule_count"]
    groups = {leaf.group for leaf in counts}
    same = {group for group in groups if of(old, group) == of(new, group)}
    restarts = [leaf.name for leaf in counts if leaf.group not in same]
    return {**pairs, **dict.fromkeys(restarts, Pair(note="restarts"))}


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


# Which leaf of the source each leaf of a state continues, by their descriptions.


_STEP: Final = "state/step"


@dataclasses.dataclass(frozen=True)
class Pair:
    """The source of one leaf of the new state."""

    sources: tuple[LeafInfo, ...] = ()  # several if groups agree, none if it is new
    note: str = ""  # why it is new, or a remark
    lookalike: LeafInfo | None = None  # for a new leaf, an old one of the name but another meaning
    counts: str = ""  # for a schedule's new count, the name of the leaf that it continues from


@dataclasses.dataclass
class Pairing:
    """The source of every leaf of a new state: `pairs`; what is `reinitialised`, or `unclear`."""

    old: Side
    new: Side
    ruled: Mapping[str, tuple[LeafInfo, ...]]  # sources that rules of the caller decide

    def __post_init__(self) -> None:
        self._numbers: dict[tuple[Names, Names, str], Mapping[int, int]] = {}
        self.unclear: list[str] = []
        free = [leaf for leaf in self.new.leaves.values() if leaf.name not in self.ruled]
        self.pairs = {name: Pair(sources) for name, sources in self.ruled.items()}
        self.pairs |= {x.name: self._of_parameter(x) for x in free if x.parameter is not None}
        shared = {x.name: self._shared(x) for x in free if x.parameter is None}
        self.reinitialised = dict(self._reinitialised(shared))
        for leaf in free:
            own, others = self.pairs.get(leaf.name), shared.get(leaf.name, ())
            self.pairs[leaf.name] = self._decided(leaf, own, others)
        self._give_keys_once(shared)
        for name in shared:
            pair, leaf = self.pairs[name], self.new.leaves[name]
            if leaf.role == "schedule_count" and not pair.sources:
                self.pairs[name] = dataclasses.replace(pair, counts=self._updates(leaf))
        self.pairs = dict(map(self._with_notes, self.new.leaves.values()))

    def _decided(self, leaf: LeafInfo, own: Pair | None, shared: Sequence[LeafInfo]) -> Pair:
        is_free = leaf.role in ("schedule_count", "key")
        if own is None and self.new.is_recorded(leaf):
            return self._recorded(leaf, shared)
        if own is None and leaf.role == "schedule_count":
            return self._agreed(shared, leaf)
        if not is_free and (why := self.reinitialised.get(leaf.kept_by, "")):
            return Pair(note=why)
        if own is None and shared and self._holds_others(leaf, shared[0]):
            return Pair(note="it concatenates parameters, and these are not the same")
        return Pair(tuple(shared)) if own is None else own

    def _of_parameter(self, leaf: LeafInfo) -> Pair:
        """The old leaf for one that follows a parameter."""
        sources = self.old.groups(leaf.kept_by.name, leaf.parameter)
        if leaf.group not in sources and len(sources) > 1:
            return Pair(note="several groups have one")
        group = leaf.group if leaf.group in sources else next(iter(sources), None)
        source = None if group is None else self._in(group, leaf)
        if source is None:
            is_other = leaf.group in sources and self._number(leaf.group, leaf) is None
            return Pair(note="no other has its settings" if is_other else "")
        is_same = source.dimensions == leaf.dimensions
        if None in (source.dimensions, leaf.dimensions):
            # Their dimensions are not known: only equal settings ensure equal dimensions.
            is_same = is_alike(self.old.keeper(source), self.new.keeper(leaf))
        was, now = (dimensions_text(x.dimensions) for x in (source, leaf))
        why = f"had the dimensions {was} of its parameter, has {now}"
        return Pair((source,)) if is_same else Pair(note=why, lookalike=source)

    def _in(self, group: Names, leaf: LeafInfo) -> LeafInfo | None:
        number = self._number(group, leaf)
        return None if number is None else self.old.find(leaf, group, number)

    def _number(self, group: Names, leaf: LeafInfo) -> int | None:
        """The old number of the transformation of a leaf."""
        name = leaf.kept_by.name
        key = group, leaf.group, name
        if key not in self._numbers:
            before, after = self.old.alike(group, name), self.new.alike(leaf.group, name)
            if not before:  # they are not described
                return leaf.kept_by.number
            self._numbers[key], is_clear = like_numbers(self.old, self.new, name, group, leaf.group)
            if not is_clear:
                many = f"{len(before)} `{name}` the {len(after)} are"
                self.unclear.append(f"it is not clear which of {many}")
        return self._numbers[key].get(leaf.kept_by.number)

    def _shared(self, leaf: LeafInfo) -> Sequence[LeafInfo]:
        """The leaves of old groups that may be the source of a leaf of no parameter."""
        sources = (self._in(group, leaf) for group in self._group_sources(leaf))
        return [source for source in sources if source is not None]

    def _group_sources(self, leaf: LeafInfo) -> Sequence[Names]:
        """The groups of the old state with a source for a leaf of no parameter."""
        having = self.old.groups(leaf.kept_by.name)
        where = leaf.kept_by
        own = [x for x in self.new.leaves_of(where) if x.parameter is not None]
        sources = {source.group for x in own for source in self.pairs[x.name].sources}
        if own and not sources:
            params = [o for param in self.new.followed(where) for o in self.new.came_from(param)]
            sources = {g for param in params for g in self.old.groups(leaf.kept_by.name, param)}
        elif not own:
            # The members of a group within one definition are not always known; its name suffices.
            if leaf.group in having and leaf.group not in self.old.owners.values():
                return [leaf.group]
            params = [o for p in _params(self.new, leaf) for o in self.new.came_from(p)]
            known = [set(self._groups_of(o, having)) for o in params if o in self.old.owners]
            is_whole = bool(known) and all(leaf.group in groups for groups in known)
            sources = {leaf.group} if is_whole else set().union(*known)
        return [group for group in having if group in sources]

    def _holds_others(self, leaf: LeafInfo, source: LeafInfo) -> bool:
        """Whether a leaf concatenates other parameters, or these in another order."""
        if not self.new.holds_parameters(leaf):
            return False
        now = [list(self.new.came_from(param)) for param in _params(self.new, leaf)]
        return now != [[param] for param in _params(self.old, source)]

    def _groups_of(self, param: Names, having: Sequence[Names]) -> Iterator[Names]:
        """The groups of the old state that a parameter is, or may be, in."""
        owner = self.old.owners[param]
        inner = self.old.groups(param)
        for group in having:
            if group == owner[: len(group)] or group in inner:
                yield group
            elif group[: len(owner)] == owner and not any(len(g) > len(owner) for g in inner):
                yield group  # one inside of a definition, that keeps nothing per parameter

    def _reinitialised(
        self, shared: Mapping[str, Sequence[LeafInfo]]
    ) -> Iterator[tuple[TransformationKey, str]]:
        """The transformations of groups that must be reinitialised, with the reason."""
        # The first of several reasons counts.
        for name, sources in reversed(list(shared.items())):
            leaf = self.new.leaves[name]
            is_free = leaf.role in ("schedule_count", "key")
            if is_free or not sources or self.new.is_recorded(leaf):
                continue
            if why := self._unlike(sources, leaf):
                yield leaf.kept_by, f"reinitialised: {why}"

    def _unlike(self, sources: Sequence[LeafInfo], leaf: LeafInfo) -> str:
        """Returns how the groups that a leaf comes from disagree; empty if they agree."""
        is_same = self.old.same(sources) if sources else True
        if is_same:
            return ""
        field = "/".join(leaf.field)
        if is_same is None:
            return f"nothing says whether its groups agree about `{field}`"
        known = [source for source in sources if source.value is not None]
        groups = [f"`{'/'.join(x.group)}`" if x.group else "no group" for x in known]
        values = ", ".join(f"{group} {x.value}" for group, x in zip(groups, known, strict=True))
        return f"its groups do not agree about `{field}`{f': {values}' if values else ''}"

    def _recorded(self, leaf: LeafInfo, sources: Sequence[LeafInfo]) -> Pair:
        """A value that was set at run time continues, unless the setting has changed."""
        name = leaf.field[-1]
        setting = self.new.keeper(leaf).settings.get(name)
        before = [self.old.keeper(source).settings for source in sources]
        if not all(name in settings for settings in before):
            return Pair(tuple(sources), f"saved; nothing says what the code gave as `{name}`")
        for was in (settings[name] for settings in before):
            if was != setting:
                changed = f"`{name}` was {setting_text(was)}, is {setting_text(setting)}"
                return Pair(note=f"{changed} in the code, which acts")
        return self._agreed(sources, leaf)

    def _agreed(self, sources: Sequence[LeafInfo], leaf: LeafInfo) -> Pair:
        why = self._unlike(sources, leaf)
        return Pair(note=why) if why else Pair(tuple(sources))

    def _give_keys_once(self, shared: Mapping[str, Sequence[LeafInfo]]) -> None:
        """Each key is used once: groups with copies of one would draw the same random numbers."""
        leaves = [self.new.leaves[name] for name in shared]
        keys = [x for x in leaves if x.role == "key" and self.pairs[x.name].sources]
        used: set[str] = set()

        def moves(leaf: LeafInfo) -> bool:
            return all(source.group != leaf.group for source in self.pairs[leaf.name].sources)

        for leaf in sorted(keys, key=moves):  # first those that stay in their group
            free = [source for source in self.pairs[leaf.name].sources if source.name not in used]
            # Any of several keys will do.
            taken = free if len(free) > 1 and self.old.same(free) else free[:1]
            note = "" if taken else "its key continues in another group"
            self.pairs[leaf.name] = Pair(tuple(taken), note)
            used.update(source.name for source in taken)

    def _updates(self, schedule: LeafInfo) -> str:
        """The name of the count of updates that drives a new schedule."""
        for leaf in self.new.leaves.values():
            if not _counts_around(self.new, leaf, schedule):
                continue
            what, olds = (leaf.transformation, leaf.field), self.old.leaves.values()
            like = [x for x in olds if (x.transformation, x.field) == what]
            sources = self.pairs[leaf.name].sources or like
            if sources and self.old.same(sources):
                return sources[0].name
        return _STEP

    def _with_notes(self, leaf: LeafInfo) -> tuple[str, Pair]:
        """A pair with notes on a changed number, and on settings without effect."""
        pair = self.pairs[leaf.name]
        notes = [pair.note] if pair.note else []
        for source in pair.sources[:1]:
            is_moved = source.group != leaf.group or leaf.name in self.ruled
            if not is_moved and source.transformation != leaf.transformation:
                notes.append(f"was `{source.kept_by._replace(group=())}`, by its settings")
            if leaf.role not in ("count", "schedule_count", "key"):
                notes += self._without_effect(leaf, source)
        return leaf.name, dataclasses.replace(pair, note=", ".join(notes))

    def _without_effect(self, leaf: LeafInfo, source: LeafInfo) -> Iterator[str]:
        one, other = self.old.keeper(source), self.new.keeper(leaf)
        for name, bearing in other.bearing.items():
            if bearing.effect == "initial" and name in one.settings:
                was, now = one.settings[name], other.settings.get(name)
                if was != now:
                    yield f"`{name}` was {was}, is {now}: no effect on the saved state"


def _counts_around(side: Side, leaf: LeafInfo, other: LeafInfo) -> bool:
    """Whether a leaf counts the updates of a window of mini-steps around another."""
    path = side.paths[leaf.name]
    place = path[: len(path) - len(leaf.field)]
    return (
        side.counts_updates(leaf)
        and side.paths[other.name][: len(place)] == place
        and other.transformation != leaf.transformation
        and leaf.group == other.group[: len(leaf.group)]
    )


def _params(side: Side, leaf: LeafInfo) -> Sequence[Names]:
    """The parameters of the transformation of a leaf, or else of its group."""
    if (known := side.keeper(leaf).parameters) is not None:
        return known
    inside = [p for p in side.owners if leaf.group in side.groups(p)]
    return inside or [p for p, owner in side.owners.items() if owner == leaf.group[: len(owner)]]
