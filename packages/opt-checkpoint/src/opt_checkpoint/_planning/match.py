"""Which leaf of a checkpoint becomes which leaf of an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from opt_checkpoint._naming.names import NamedState
from opt_checkpoint._naming.schema import LeafInfo, Names, Source, leaf_name, leaf_path
from opt_checkpoint._planning.beside import dropped, joined, with_counts, with_initial, with_notes
from opt_checkpoint._planning.compare import (
    INJECTING,
    changes,
    have_other_dimensions,
    home_of,
    occurrences,
    regrouped_changes,
)
from opt_checkpoint._planning.fit import fitted
from opt_checkpoint._planning.homes import Homes, frozen
from opt_checkpoint._planning.kept import KeptDimensions, without_ruled
from opt_checkpoint._planning.plan import Plan, Row
from opt_checkpoint._planning.renames import suggested_renames
from opt_checkpoint._planning.rules import (
    Map,
    Pad,
    Policy,
    Rename,
    Rule,
    Stack,
    Unstack,
    sources_of,
)
from opt_checkpoint._planning.values import RuledRows
from opt_checkpoint._planning.windows import Running, bearing_problems
from opt_checkpoint._targets.named import named_view
from opt_checkpoint._targets.view import view_of

_Target = TypeVar("_Target")


def plan_restore(
    checkpoint: Source,
    target: _Target,
    *,
    allow: Iterable[str] = (),
    rules: Sequence[Rule] = (),
) -> Plan[_Target]:
    r"""Returns what restoring a checkpoint into an optimizer would do with every leaf.

    Leaves meet by name. A leaf whose parameter has moved to another group is found there. What a
    group keeps for all its parameters, such as a count, is taken where all the groups that they
    come from agree about it; where they do not, that transformation starts anew in the group.

    Args:
      checkpoint: a step of a `Checkpointer`, a `NamedState`, or any other `Source`.
      target: the optimizer to restore, of any kind that `named_state` takes; its leaves may be
        `jax.ShapeDtypeStruct`s with shardings. Parameters that the checkpoint lacks need arrays.
      allow: the kinds of changes that are admitted: see `Kind`. Without any, everything has to
        match.
      rules: pairs of a regular expression, which has to match a whole name, and an `Action`; the
        first that matches decides, and admits what it says.

    Returns:
      The plan. Nothing has been read but the schema; `plan.apply()` restores, and returns what
      `target` is.

    Raises:
      TypeError: `target` is of another kind, or `checkpoint` cannot be read from.
      TypeError, ValueError: `allow` or `rules` are none; or a rule matches no leaf.

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
    _check_source(checkpoint)
    policy = Policy.make(allow, rules)
    view = view_of(target)
    named = named_view(view)
    matcher = _Matcher(checkpoint, named, policy)
    rows = with_counts(matcher.rows(), matcher.anew, policy)
    saved = checkpoint.schema.by_name
    pairs = [(saved[name], row.leaf) for row in rows for name in row.sources]
    by_rule = {row.leaf.name for row in rows if policy.rule(row.leaf.name) is not None}
    running = Running(pairs, checkpoint.schema)
    rows = with_notes(joined(row, running, policy) for row in rows)
    rows = with_initial(rows, checkpoint.schema, named.schema)
    _check_rules(policy, rows, checkpoint)
    idle = frozen(named.schema)
    trained = {o for param, found in matcher.origins.items() if param not in idle for o in found}
    # A `Rename` keeps what a leaf keeps, whatever that was.
    ruled = [row.leaf for row in rows if row.how or isinstance(row.by, Pad)]
    schema = without_ruled(named.schema, [leaf for leaf in ruled if leaf.kind == "state"])
    changed = changes(checkpoint.schema, schema)
    changed += regrouped_changes(checkpoint.schema, schema, pairs)
    return Plan(
        rows=tuple(rows),
        dropped=tuple(dropped(checkpoint.schema, rows, running, policy, trained)),
        changes=tuple(dict.fromkeys(changed)),
        problems=tuple(bearing_problems(pairs, checkpoint.schema, named.schema, by_rule)),
        suggestions=tuple(suggested_renames(checkpoint.schema, named.schema, rows, by_rule)),
        allow=policy.allow,
        source=checkpoint,
        target=target,
        view=view,
    )


def _check_source(checkpoint: Any) -> None:
    if not isinstance(checkpoint, Source):
        raise TypeError(
            "`checkpoint` must be a step (`Checkpointer.at`, `latest_valid`, `open_step`) or a "
            f"`NamedState`; found {type(checkpoint).__name__}"
        )


class _Matcher:
    """One walk over the leaves of a target."""

    def __init__(self, source: Source, named: NamedState, policy: Policy) -> None:
        self.source = source
        self.saved = {leaf.name: leaf for leaf in source.schema.leaves if leaf.kind != "extra"}
        self.named, self.policy = named, policy
        self.moved = occurrences(source.schema.transformations, named.schema.transformations)
        self.origins = dict(self._origins())
        self.homes = Homes(source, named.schema, self.origins)
        self.anew = self.homes.disagreements(named.schema)
        kept = KeptDimensions(source.schema, named.schema)
        self.ruled = RuledRows(self.saved, named.schema.leaves, kept, policy)

    def _origins(self) -> Iterator[tuple[Names, list[Names]]]:
        """The parameters of the checkpoint that each of the target's comes from."""
        for leaf in self.named.schema.leaves:
            if leaf.kind == "params":
                found = self.policy.rule(leaf.name)
                names: tuple[str, ...] = (leaf.name,)
                if found is not None and isinstance(found[1], Rename | Stack | Unstack | Map):
                    names = sources_of(found[1], found[2], leaf.shape)
                yield leaf.path[1:], [leaf_path(n)[1:] for n in names if n in self.saved]

    def rows(self) -> Iterator[Row]:
        for leaf in self.named.schema.leaves:
            yield self._row(leaf)

    def _row(self, leaf: LeafInfo) -> Row:
        found = self.policy.rule(leaf.name)
        if found is not None:
            _, action, match = found
            if action == "initialise":
                return self._initialised(leaf, "as a rule says", is_ruled=True)
            if action == "keep":
                return self._kept(leaf)
            if isinstance(action, Rename | Stack | Unstack | Map):
                return self.ruled.taken(leaf, action, match)
        admitted = self.policy.allow
        if found is not None and isinstance(found[1], str):
            admitted = admitted | {found[1]}
        why = self.anew.get((leaf.group, leaf.transformation)) if leaf.transformation else None
        sources, kinds, note = ([], (), why) if why is not None else self._find(leaf)
        if not sources:
            return self._scheduled(leaf, note) or self._initialised(leaf, note)
        if found is not None and isinstance(found[1], Pad):
            row = self.ruled.padded(leaf, found[1], sources[0], kinds, note)
            is_own = row.sources == (sources[0].name,)
            names = tuple(source.name for source in sources)
            return dataclasses.replace(row, sources=names) if is_own else row
        if why := self._left_behind(leaf, sources[0]):
            return self._let_go(leaf, why)
        if have_other_dimensions(sources[0], leaf):
            return self._let_go(leaf, "the checkpoint has it for other dimensions")
        row = fitted(leaf, sources[0], kinds, note, admitted)
        return dataclasses.replace(row, sources=tuple(source.name for source in sources))

    def _scheduled(self, leaf: LeafInfo, why: str) -> Row | None:
        """The row of a schedule's count that is new: schedules do not restart in silence."""
        if leaf.role != "schedule_count" or leaf.parameter is not None:
            return None
        name = self._updates_around(leaf) or "state/step"
        if name not in self.saved or self.saved[name].shape != leaf.shape:
            return None
        note = f"a new count, which goes on from `{name}`{f' ({why})' if why else ''}"
        return fitted(leaf, self.saved[name], ("initialise",), note, self.policy.allow)

    def _updates_around(self, leaf: LeafInfo) -> str:
        """The saved count of the updates of windows that hold a transformation, if any does."""
        schema = self.named.schema
        for other in schema.leaves:
            made = schema.transformation_of(other)
            if made is None or other.role != "count" or other.parameter is not None:
                continue
            windows = {
                b.count for b in made.bearing.values() if b.effect == "window" and not b.modulo
            }
            is_around = other.group == leaf.group[: len(other.group)]
            if windows and other.field not in windows and is_around and other.name in self.saved:
                return other.name
        return ""

    def _find(self, leaf: LeafInfo) -> tuple[Sequence[LeafInfo], tuple[str, ...], str]:
        """The leaves of the checkpoint that this one is: several where groups agree about it."""
        if leaf.kind != "state" or not leaf.transformation:
            return self._named(leaf.name), (), ""
        if (where := (leaf.group, leaf.transformation)) in self.moved:
            other = self.moved[where]
            if other is None:
                return (), (), "no other has its settings"
            if found := self._named(_renamed(leaf, other)):
                return found, ("optimizer",), f"was `{other}`, by its settings"
        homes = self.homes.of(leaf.group, leaf.transformation)
        is_elsewhere = leaf.parameter is None and homes and leaf.group not in homes
        is_shared = leaf.parameter is None and len(homes) > 1
        if leaf.name in self.saved and not is_elsewhere and not is_shared:
            is_given = "hyperparams" in leaf.field and leaf.transformation.startswith(INJECTING)
            return self._named(leaf.name), (), "the saved value, not the target's" * is_given
        candidates = self._elsewhere(leaf, homes)
        if leaf.parameter is None:
            candidates = [c for c in candidates if c.group in homes]
        if not candidates or not self.homes.are_agreed(candidates):
            return (), (), ""
        if leaf.parameter is not None and len(candidates) > 1:
            return (), (), "several groups have one"
        if [c.name for c in candidates] == [leaf.name]:
            return candidates, (), ""
        return candidates, ("regroup",), "the groups agree" if len(candidates) > 1 else ""

    def _elsewhere(self, leaf: LeafInfo, homes: Sequence[Names]) -> Sequence[LeafInfo]:
        """The same leaf of the groups of the checkpoint: that of the like one set as this one."""
        old, new = self.source.schema.transformations, self.named.schema.transformations
        found = []
        for home in homes:
            name = home_of(leaf.transformation, old, home, new, leaf.group)
            given = self.homes.by_key.get((name, leaf.field, leaf.parameter), [])
            found += [candidate for candidate in given if candidate.group == home]
        return found

    def _named(self, name: str) -> Sequence[LeafInfo]:
        return [self.saved[name]] if name in self.saved else []

    def _initialised(self, leaf: LeafInfo, note: str, *, is_ruled: bool = False) -> Row:
        admitted = is_ruled or "initialise" in self.policy.allow
        problem = ""
        if leaf.kind == "params" and _is_abstract(self.named[leaf.name]):
            problem = (
                "the checkpoint does not have it, and the target gives no value: create the "
                "optimizer with arrays for new parameters"
            )
        return Row(
            leaf,
            "initialised",
            kinds=("initialise",),
            note=note,
            problem=problem,
            is_admitted=admitted,
        )

    def _left_behind(self, leaf: LeafInfo, source: LeafInfo) -> str:
        """Why a leaf whose parameter a rule makes is not its namesake; empty if it is.

        A moment that still fits its parameter's shape, fits not its values.
        """
        if leaf.kind != "state" or leaf.parameter is None:
            return ""
        name = leaf_name(("params", *leaf.parameter))
        found = self.policy.rule(name)
        if found is None or isinstance(found[1], str):
            return ""
        if isinstance(found[1], Pad):
            return self.ruled.unpadded(leaf, found[1], source)
        is_moved = self.origins.get(leaf.parameter) != [source.parameter]
        if isinstance(found[1], Rename) and not is_moved:
            return ""
        return f"a `{type(found[1]).__name__}` makes `{name}`, and no rule says what this becomes"

    def _let_go(self, leaf: LeafInfo, why: str) -> Row:
        row = self._initialised(leaf, why)
        admitted = {"initialise", "drop"} <= self.policy.allow
        return dataclasses.replace(row, kinds=("initialise", "drop"), is_admitted=admitted)

    def _kept(self, leaf: LeafInfo) -> Row:
        problem = "the target gives no value to keep" if _is_abstract(self.named[leaf.name]) else ""
        note = "the target's own, as a rule says"
        return Row(leaf, "initialised", by="keep", note=note, problem=problem)


def _renamed(leaf: LeafInfo, transformation: str) -> str:
    at = 2 * len(leaf.group) + 1
    return leaf_name((*leaf.path[:at], transformation, *leaf.path[at + 1 :]))


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
