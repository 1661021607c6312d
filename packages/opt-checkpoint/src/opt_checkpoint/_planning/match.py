"""Which leaf of a checkpoint becomes which leaf of an optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import jax
import numpy as np
from opt_core import describe_state
from opt_core.state_changes import (
    STEP,
    Move,
    Pair,
    differences,
    earlier_changes,
    holds_parameters,
    inside,
    pair_leaves,
    refusals,
    statistics,
)

from opt_checkpoint._naming.schema import LeafInfo, Names, Source, leaf_name, leaf_path, numbered
from opt_checkpoint._planning.initial import unlike_initial
from opt_checkpoint._planning.kept import KeptDimensions
from opt_checkpoint._planning.placement import with_placement
from opt_checkpoint._planning.plan import Plan, Row
from opt_checkpoint._planning.rules import Action, Pad, Policy, Rename, Rule, Taking, sources_of
from opt_checkpoint._planning.sides import frozen, side_of, state_leaves
from opt_checkpoint._planning.stored import plain_sides, with_ways
from opt_checkpoint._planning.suggestions import suggested_renames
from opt_checkpoint._planning.values import RuledRows, fitted
from opt_checkpoint._targets.named import named_view
from opt_checkpoint._targets.view import View, view_of

_Target = TypeVar("_Target")


def plan_restore(
    checkpoint: Source,
    target: _Target,
    *,
    allow: Iterable[str] = (),
    rules: Sequence[Rule] = (),
    placement: Any = None,
) -> Plan[_Target]:
    r"""Returns what restoring a checkpoint into an optimizer would do with every leaf.

    Leaves are paired by name. A leaf whose parameter has moved to another group is found there.
    What a group keeps for all its parameters, such as a count, is kept if all the groups that they
    come from agree about it; otherwise that transformation is reinitialised in the group.

    Args:
      checkpoint: a step of a `Checkpointer`, a `NamedState`, or any other `Source`.
      target: the optimizer to restore, of any kind that `named_state` takes; its leaves may be
        `jax.ShapeDtypeStruct`s with shardings. Parameters that the checkpoint lacks need arrays.
      allow: the kinds of changes that are admitted: `'initialise'`, a leaf that the checkpoint
        lacks, as `init` makes it; `'drop'`, a leaf that the target has no place for; `'cast'`,
        another dtype, where every value fits; `'reshape'`, another shape of the same size;
        `'regroup'`, a leaf whose parameter is in another group, or no longer in one;
        `'optimizer'`, other transformations, or others in their order. Without any, everything
        has to match.
      rules: pairs of a regular expression, which has to match a whole name, and an `Action`; the
        first that matches decides, and admits what it says.
      placement: where leaves go that the target itself does not place, that is, abstract ones
        without shardings and arrays that are not committed to devices: a `MemoryPlan` or a `Layout`
        of opt-partition, anything else with trees of shardings as `params` and `state` or
        `opt_state`, one such tree for the state or the parameters, or one sharding for all leaves.
        Without it, they go where the checkpoint had them, if those devices are here.

    Returns:
      The plan. Only the schema has been read; `plan.apply()` restores, and returns the same kind as
      `target`.

    Raises:
      LeafError: `placement` was made for other leaves; names one.
      TypeError: `target` is of another kind, or `checkpoint` cannot be read from.
      TypeError, ValueError: `allow` or `rules` are invalid, or a rule matches no leaf.

    Examples:
      >>> import jax.numpy as jnp
      >>> from opt_checkpoint import named_state
      >>> import opt_optax_bridge as opt
      >>> params = {'w': jnp.ones(2)}
      >>> saved = named_state(opt.adam(1e-3).create(params))
      >>> print(plan_restore(saved, opt.sgd(1e-3, momentum=0.9).create(params)))
      2 kept (12 bytes), 1 initialised (8 bytes), 3 dropped (20 bytes)
      !* optimizer: `adam` is gone
      !* optimizer: `trace` is new
      !+ state/trace/trace/w float32[2]
      !- state/adam/count int32[]
      !- state/adam/mu/w float32[2]
      !- state/adam/nu/w float32[2]
    """
    if not isinstance(checkpoint, Source):
        raise TypeError(
            "`checkpoint` must be a step (`Checkpointer.at`, `latest_valid`, `open_step`) or a "
            f"`NamedState`; found {type(checkpoint).__name__}"
        )
    policy = Policy.make(allow, rules)
    view = with_placement(view_of(target), placement)
    checkpoint, view = plain_sides(checkpoint, view, policy)
    matcher = _Matcher(checkpoint, view, policy)
    rows = with_ways(matcher.rows(), checkpoint, view, policy)
    _check_rules(policy, rows, checkpoint)
    move = matcher.move(rows)
    refused = list(refusals(move))
    names = {
        matcher.new.names[r.new]: f"{r.text}, or initialise it by a rule"
        for r in refused
        if r.new is not None
    }
    rows = [
        row if row.problem else dataclasses.replace(row, problem=names.get(row.leaf.name, ""))
        for row in rows
    ]
    left = {matcher.old.names[r.old]: r.text for r in refused if r.old is not None}
    # If a checkpoint says nothing of its optimizer, nothing is compared.
    changed = [] if checkpoint.schema.optimizer is None else [*differences(move)]
    changed += [*matcher.turned, *earlier_changes(move), *statistics(move, matcher.origins)]
    return Plan(
        rows=tuple(rows),
        dropped=tuple(_dropped(checkpoint, rows, left, policy, matcher.replaced)),
        changes=tuple(dict.fromkeys(changed)),
        problems=tuple(r.text for r in refused if r.old is None and r.new is None),
        suggestions=tuple(suggested_renames(move)),
        allow=policy.allow,
        source=checkpoint,
        target=target,
        view=view,
    )


class _Matcher:
    """One walk over the leaves of a target."""

    def __init__(self, source: Source, view: View, policy: Policy) -> None:
        self.named, self.policy = named_view(view), policy
        schema = self.named.schema
        self.saved = {leaf.name: leaf for leaf in source.schema.leaves if leaf.kind != "extra"}
        self._had, self._kept = KeptDimensions(source.schema), KeptDimensions(schema)
        unlike_init = functools.cache(lambda: unlike_initial(view, schema))
        self.ruled = RuledRows(
            self.saved, schema.leaves, self._had, self._kept, policy, unlike_init
        )
        self.origins = dict(self._origins())
        self._old = state_leaves(source.schema, schema.by_name)
        leaves = [leaf for leaf in schema.leaves if leaf.transformation]
        self.old = side_of(source, self._old)
        self.new = side_of(self.named, leaves, describe_state(view.optimizer))
        self._by_rule = {
            leaf.name: row for leaf in schema.leaves if (row := self._row_by_rule(leaf)) is not None
        }
        self._places = {leaf.name: i for i, leaf in enumerate(self._old)}
        given = {
            j: [self._places[name] for name in row.sources if name in self._places]
            for j, leaf in enumerate(leaves)
            if (row := self._by_rule.get(leaf.name)) is not None
        }
        self.pairing = pair_leaves(self.old, self.new, given=given, origins=self.origins)
        self.replaced = {self._old[i].name for p in self.pairing.pairs for i in p.replaced}
        self.turned: list[str] = []

    def _origins(self) -> Iterator[tuple[Names, list[Names]]]:
        """The parameters of the checkpoint that each of the target's comes from."""
        for leaf in self.named.schema.leaves:
            if leaf.kind == "params":
                found = self.policy.rule(leaf.name)
                names: tuple[str, ...] = (leaf.name,)
                if found is not None and isinstance(found[1], Taking):
                    names = sources_of(found[1], found[2], leaf.shape)
                yield leaf.path[1:], [leaf_path(n)[1:] for n in names if n in self.saved]

    def rows(self) -> list[Row]:
        """What becomes of every leaf of the target."""
        found, pairs = [], iter(self.pairing.pairs)
        for leaf in self.named.schema.leaves:
            pair = next(pairs) if leaf.transformation else None
            row = self._by_rule.get(leaf.name)
            if row is None:
                row = self._by_name(leaf) if pair is None else self._paired(leaf, pair)
            elif pair is not None and pair.note:
                row = dataclasses.replace(row, note=", ".join(filter(None, (row.note, pair.note))))
            found.append(row)
        return list(_with_notes(self._with_counts(found)))

    def move(self, rows: Sequence[Row]) -> Move:
        """The `Move` that surgery would make."""
        of_state = [row for row in rows if row.leaf.transformation]
        pairs = [
            Pair(tuple(self._places[name] for name in row.sources if name in self._places))
            for row in of_state
        ]
        ruled = {
            j
            for j, row in enumerate(of_state)
            if row.by is not None and (row.sources or not isinstance(row.by, Pad))
        }
        ruled |= {j for j, row in enumerate(of_state) if self._is_fresh(row.leaf.name)}
        fresh = {row.leaf.name for row in of_state if row.is_ok and not row.sources}
        let_go = {
            i
            for i, leaf in enumerate(self._old)
            if self.policy.rule(leaf.name, drop=True) is not None
            or (leaf.parameter is not None and leaf.name in fresh and self._is_fresh(leaf.name))
        }
        idle = frozen(self.named.schema)
        trained = {o for param, found in self.origins.items() if param not in idle for o in found}
        gone = {leaf.parameter for leaf in self._old if leaf.parameter is not None} - trained
        return Move(self.old, self.new, pairs, ruled, let_go, gone)

    def _action(self, name: str) -> Action | None:
        """The action of the rule for a leaf of the target, if any."""
        found = self.policy.rule(name)
        return None if found is None else found[1]

    def _is_fresh(self, name: str) -> bool:
        """Whether a rule says that a leaf of the target does not come from the checkpoint."""
        return self._action(name) in ("initialise", "keep")

    def _with_counts(self, rows: Sequence[Row]) -> Iterator[Row]:
        """Refuses to reinitialise a count whose moments are kept by rules."""
        ruled: dict[tuple[Names, str], str] = {}
        fresh = {(made[0], numbered(*made[1:])) for made in self.pairing.reinitialised}
        for row in rows:
            if row.leaf.parameter is not None and row.by is not None:
                ruled.setdefault((row.leaf.group, row.leaf.transformation), row.leaf.name)
        for row in rows:
            where = row.leaf.group, row.leaf.transformation
            is_count = row.action == "initialised" and row.leaf.parameter is None
            is_free = row.problem or self._is_fresh(row.leaf.name)
            if is_count and not is_free and where in fresh and where in ruled:
                problem = f"{row.note}, while a rule keeps `{ruled[where]}`: give this a rule too"
                row = dataclasses.replace(row, problem=problem)
            yield row

    def _row_by_rule(self, leaf: LeafInfo) -> Row | None:
        """The row of a leaf whose source a rule states."""
        found = self.policy.rule(leaf.name)
        if found is None:
            return None
        _, action, match = found
        if action == "initialise":
            return self._initialised(leaf, "as a rule says", is_ruled=True)
        if action == "keep":
            return self._own_value(leaf)
        if isinstance(action, Taking):
            return self.ruled.taken(leaf, action, match)
        return None

    def _by_name(self, leaf: LeafInfo) -> Row:
        """The row of a parameter, or of the step."""
        if leaf.name not in self.saved:
            return self._initialised(leaf, "")
        return self._fitted(leaf, [self.saved[leaf.name]], (), "")

    def _paired(self, leaf: LeafInfo, pair: Pair) -> Row:
        if pair.replaced:
            return Row(leaf, "initialised", note=pair.note)
        sources = [self._old[i] for i in pair.sources]
        if pair.counts is not None:
            name = "state/step" if pair.counts == STEP else self.old.names[pair.counts]
            if name in self.saved and self.saved[name].shape == leaf.shape:
                why = f" ({pair.note})" if pair.note else ""
                note = f"a new count, which continues from `{name}`{why}"
                return fitted(leaf, self.saved[name], ("initialise",), note, self.policy.allow)
        if not sources and pair.lookalike is not None:
            like = self._old[pair.lookalike]
            if like.shape != leaf.shape or isinstance(self._action(leaf.name), Pad):
                return self._fitted(leaf, [like], (), "")
            if self._had.shapes.get(like.parameter) == self._kept.shapes.get(leaf.parameter):
                name = leaf_name((*leaf.field, *(leaf.parameter or ())))
                self.turned.append(f"`{name}` of `{leaf.base}`{inside(leaf.group)} {pair.note}")
            return self._initialised(leaf, self._left_behind(leaf, like) or pair.note, "drop")
        if not sources:
            return self._initialised(leaf, pair.note)
        is_numbered = sources[0].group == leaf.group and sources[0].name != leaf.name
        is_moved = [source.name for source in sources] != [leaf.name] and not is_numbered
        kinds = ("optimizer",) * is_numbered + ("regroup",) * is_moved
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
        elif why := self._left_behind(leaf, sources[0]):
            return self._initialised(leaf, why, "drop")
        else:
            admitted = self.policy.allow | ({action} if isinstance(action, str) else set())
            row = fitted(leaf, sources[0], kinds, note, admitted)
        is_own = row.sources == (sources[0].name,)
        names = tuple(source.name for source in sources)
        return dataclasses.replace(row, sources=names) if is_own else row

    def _initialised(self, leaf: LeafInfo, note: str, *more: str, is_ruled: bool = False) -> Row:
        kinds = ("initialise", *more)
        admitted = is_ruled or {*kinds} <= self.policy.allow
        is_missing = leaf.kind == "params" and _is_abstract(self.named[leaf.name])
        problem = "the checkpoint lacks it: give arrays for new parameters" if is_missing else ""
        return Row(
            leaf, "initialised", kinds=kinds, note=note, problem=problem, is_admitted=admitted
        )

    def _left_behind(self, leaf: LeafInfo, source: LeafInfo) -> str:
        """Why a leaf is not that of the same name if a rule makes its parameter; empty if it is.

        A moment may still fit the shape of its parameter, but not its values.
        """
        if leaf.transformation and holds_parameters(leaf.description):
            for param in self.named.schema.leaves:
                action = self._action(param.name) if param.kind == "params" else None
                if action is not None and not isinstance(action, str | Rename):
                    what = f"a `{type(action).__name__}` makes `{param.name}`"
                    return f"{what}, and this concatenates parameters"
        if leaf.kind != "state" or leaf.parameter is None:
            return ""
        name = leaf_name(("params", *leaf.parameter))
        action = self._action(name)
        if action is None or isinstance(action, str):
            return ""
        if isinstance(action, Pad):
            return self.ruled.unpadded(leaf, action, source)
        if isinstance(action, Rename) and self.origins.get(leaf.parameter) == [source.parameter]:
            return ""
        return f"a `{type(action).__name__}` makes `{name}`, and no rule says what this becomes"

    def _own_value(self, leaf: LeafInfo) -> Row:
        problem = "the target gives no value to keep" if _is_abstract(self.named[leaf.name]) else ""
        note = "the target's own, as a rule says"
        return Row(leaf, "initialised", by="keep", note=note, problem=problem)


_EVALUATED: Final = {
    "schedule_free": "the parameters to evaluate are computed from it, and are not those that are "
    "kept; a `Map` of `params`, `z` and `b1` restores them",
    "with_average": "the average; a `Rename` of `params` to it restores it as the parameters",
}


def _is_abstract(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)


def _check_rules(policy: Policy, rows: Sequence[Row], source: Source) -> None:
    """Raises a `ValueError` for a rule that matches nothing."""
    names = [row.leaf.name for row in rows]
    saved = [leaf.name for leaf in source.schema.leaves]
    for pattern, action in policy.rules:
        where = saved if action == "drop" else names
        if not any(pattern.fullmatch(name) for name in where):
            side = "checkpoint" if action == "drop" else "target"
            raise ValueError(
                f"`rules`: {pattern.pattern!r} matches no leaf of the {side}, which has names like "
                f"{', '.join(f'`{name}`' for name in where[:3])}"
            )


def _with_notes(rows: Iterable[Row]) -> Iterator[Row]:
    """Notes on leaves that are initialised although their count continues."""
    rows = list(rows)
    counts: dict[tuple[Names, str], str] = {}
    for row in rows:
        leaf = row.leaf
        if row.sources and leaf.transformation and leaf.parameter is None and row.value:
            where = leaf.group, leaf.transformation
            counts.setdefault(where, f"`{leaf.path[-1]}` continues from {row.value}")
    for row in rows:
        count = counts.get((row.leaf.group, row.leaf.transformation))
        is_new = row.action == "initialised" and row.leaf.parameter is not None and not row.note
        if is_new and count is not None:
            row = dataclasses.replace(row, note=f"as `init` makes it, while {count}")
        yield row


def _dropped(
    source: Source,
    rows: Sequence[Row],
    left: Mapping[str, str],
    policy: Policy,
    replaced: Collection[str],
) -> Iterator[Row]:
    """Yields the leaves of a checkpoint, and slices of leaves, that are not used."""
    used = {name for row in rows for name in row.sources}
    fresh = {row.leaf.name for row in rows if row.is_ok and not row.sources} | {*replaced}
    for leaf in source.schema.leaves:
        if leaf.kind != "extra" and leaf.name not in used:
            by_rule = policy.rule(leaf.name, drop=True) is not None
            why = f"{left[leaf.name]}, or drop it by a rule" if leaf.name in left else ""
            admitted = by_rule or "drop" in policy.allow or leaf.name in fresh
            note = _EVALUATED.get(leaf.base, "") if leaf.role == "params_copy" else ""
            yield Row(
                leaf, "dropped", kinds=("drop",), note=note, problem=why, is_admitted=admitted
            )
    taken: dict[tuple[str, int], set[int | None]] = {}
    whole = {name for row in rows if row.how != "slice" for name in row.sources}
    for row in rows:
        if row.how == "slice" and row.sources[0] not in whole:
            taken.setdefault((row.sources[0], row.axis), set()).add(row.index)
    leaves = source.schema.by_name
    for (name, axis), indices in taken.items():
        leaf = leaves[name]
        admitted = policy.rule(name, drop=True) is not None or "drop" in policy.allow
        shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
        for index in sorted(set(range(leaf.shape[axis])) - indices):
            where = ", ".join([*[":"] * axis, str(index)])
            path = (*leaf.path[:-1], f"{leaf.path[-1]}[{where}]")
            one = dataclasses.replace(leaf, path=path, shape=shape)
            yield Row(one, "dropped", kinds=("drop",), is_admitted=admitted)
