"""Changing the groups of a trained optimizer while keeping the state that still applies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from opt_core._aliasing import unalias
from opt_core._description.describe import describe_state
from opt_core._groups.leaf_groups import leaf_groups, members
from opt_core._groups.table import FROZEN, Group
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._paths import path_str
from opt_core._surgery import hazards
from opt_core._surgery.changes import (
    ChangeReport,
    LeafChange,
    check_allowances,
    leaf_path,
    listed,
)
from opt_core._surgery.moving import Options, moved_leaves
from opt_core._surgery.pairing import Pair, pair_leaves
from opt_core._surgery.placement import (
    Places,
    all_equal,
    flat_shardings,
    init_leaves,
    mesh_sharding,
    value_of,
)
from opt_core._surgery.sides import Side, counts_updates, is_recorded, made_of
from opt_core._surgery.tables import (
    as_groups,
    carved,
    check_inner_groups,
    group_of,
    matching_leaves,
    shown,
    unused,
)
from opt_core.errors import GroupError, SurgeryError

Schedules: TypeAlias = Literal["continue", "restart"]
"""Whether the counts of schedules continue, or restart at 0 in new and changed groups."""


def reset(
    optimizer: Optimizer, group: str, *, shardings: Any = None
) -> tuple[Optimizer, ChangeReport]:
    """Reinitialises the state of one group; parameters, `step` and counts of schedules stay.

    So do settings recorded in the state, such as a learning rate set at run time, and the number of
    updates of a window of mini-steps, which drives the schedules inside it. Only that group's state
    is created, with every leaf placed like the one it replaces.

    Args:
      optimizer: one of a `MultiOptimizer`.
      group: the name of the group; `outer/inner` for a group of a nested one.
      shardings: other placements of leaves; see `regroup`.

    Returns:
      The optimizer and a report; the state of the other groups is kept.

    Raises:
      GroupError: there is no such group, or it is frozen and has no state.
      SurgeryError: its parameters are perturbed (`optax.contrib.sam`) and could not be restored.
    """
    names = group_of(optimizer.optimizer_def, group)
    side = _side(optimizer)
    structure: Any = jax.tree.structure(optimizer.state.param_states)
    positions = structure.unflatten(range(structure.num_leaves))
    indexed = optimizer.replace(state=OptimizerState(optimizer.state.step, positions))
    chosen = {
        i
        for own, part in leaf_groups(indexed)
        if own[: len(names)] == names
        for i in jax.tree.leaves(part.state.param_states)
    }
    chosen = {i for i in chosen if not _stays(side, i)}
    pairs = tuple(
        Pair((), "") if i in chosen else Pair((i,)) for i in range(len(side.descriptions))
    )
    move = hazards.Move(side, side, pairs, is_asked=True)
    _check(move, Options(allow=frozenset({"drop"})))
    if shardings is None:
        shardings = jax.tree.map(mesh_sharding, optimizer.state.param_states)
    return _moved(optimizer, optimizer, move, Options(shardings=shardings))


def _stays(side: Side, i: int) -> bool:
    """Whether a leaf records the progress or a setting of the training, not what it has learnt."""
    leaf = side.descriptions[i]
    made = side.made(made_of(leaf))
    is_time = leaf.role == "schedule_count" or counts_updates(leaf, made)
    return is_time or is_recorded(leaf, made)


def freeze(
    optimizer: Optimizer, pattern: Any, *, name: str = "frozen", allow: Iterable[str] = ()
) -> tuple[Optimizer, ChangeReport]:
    """Stops updating the leaves that a pattern matches, and drops their state.

    Dropping is implied by freezing, so nothing needs to be allowed; the report lists what was
      dropped.

    Args:
      optimizer: of any definition; one without groups becomes the group `'rest'` of a
        `MultiOptimizer`.
      pattern: see `MultiOptimizer.from_rules`.
      name: of the new group; a number is appended if it is taken.
      allow: see `regroup`. `'optimizer'` allows numbers computed from all parameters, such as an
        estimated rate, to continue without the frozen ones.

    Returns:
      The optimizer and a report.

    Raises:
      GroupError: the pattern matches nothing; or it takes all parameters of a group inside a
        transformation, such as `chain(clip, groups)`: write the new definition for `regroup`.
      SurgeryError: its parameters are perturbed (`optax.contrib.sam`) and could not be restored; or
        numbers computed from all parameters would continue.
    """
    definition = as_groups(optimizer.optimizer_def)
    chosen = matching_leaves(definition, optimizer.target, pattern)
    groups = carved(definition, optimizer.target, pattern, chosen)
    frozen = Group(unused(name, groups), pattern, FROZEN)
    changed = definition.with_groups([frozen, *groups])
    check_inner_groups(changed, optimizer.target)
    options = Options(allow=check_allowances(allow) | {"drop"}, is_asked=True)
    return _regroup(optimizer, changed, options)


def unfreeze(
    optimizer: Optimizer,
    pattern: Any,
    definition: OptimizerDef,
    *,
    name: str = "unfrozen",
    schedules: Schedules = "continue",
    shardings: Any = None,
) -> tuple[Optimizer, ChangeReport]:
    """Starts updating frozen leaves.

    Args:
      optimizer: one of a `MultiOptimizer`.
      pattern: the leaves; see `MultiOptimizer.from_rules`. Those that are frozen inside a nested
        `MultiOptimizer` leave it.
      definition: how they are updated. Their state is new, except for the counts of schedules.
      name: of the new group; a number is appended if it is taken.
      schedules: `'continue'`: the new group's schedules start at the current step; `'restart'`:
        they start at 0.
      shardings: see `regroup`.

    Returns:
      The optimizer and a report.

    Raises:
      GroupError: the pattern matches nothing, or leaves that are not frozen; lists these.
    """
    whole = as_groups(optimizer.optimizer_def)
    chosen = matching_leaves(whole, optimizer.target, pattern)
    paths = whole.select(optimizer.target).paths
    owners = {names: group for group, names in members(optimizer)}
    if busy := [
        f"  `{path_str(paths[i])}` belongs to {shown(whole, owners[paths[i]])}"
        for i in sorted(chosen)
        if paths[i] in owners
    ]:
        raise GroupError(
            "`pattern` matches leaves that are not frozen:\n"
            + "\n".join(busy)
            + "\nMake it narrower, or take `regroup` to move them."
        )
    groups = carved(whole, optimizer.target, pattern, chosen)
    new = Group(unused(name, groups), pattern, definition)
    changed = whole.with_groups([new, *groups])
    check_inner_groups(changed, optimizer.target)
    options = Options(schedules=_checked(schedules), shardings=shardings)
    return _regroup(optimizer, changed, options)


def regroup(
    optimizer: Optimizer,
    new_definition: OptimizerDef,
    *,
    allow: Iterable[str] = (),
    counts: Literal["agree", "keep"] = "agree",
    schedules: Schedules = "continue",
    shardings: Any = None,
) -> tuple[Optimizer, ChangeReport]:
    """Continues with another definition, keeping every leaf of the state that has the same meaning.

    Leaves are the same thing if their descriptions agree (`describe_state`): transformation, field,
    parameter, and the parameter dimensions that they keep. Positions in a chain, wrappers and
    classes do not matter; equal shapes are not enough. Another dtype is converted.

    State that a group keeps for all its parameters, such as a count, is taken from the groups that
    they come from, if these agree. The counts of schedules continue: a new schedule starts at
    `optimizer.state.step`, or inside a window of mini-steps at the number of updates. Settings
    recorded in the state (`LeafDescription.role` `'other'` with the name of a setting) take the new
    definition's value if the definition has changed it; otherwise a value set at run time is kept.

    Args:
      optimizer: of any definition.
      new_definition: any definition. Parameters and `step` are not changed.
      allow: further changes: `'drop'` trained leaves without a successor, `'optimizer'` for a
        changed switch (`nesterov`) or order of transformations, `'reshape'` a leaf to another shape
        of the same size. `'initialise'`, `'regroup'` and `'cast'` are implied.
      counts: for leaves that were frozen, or come from a group without a count, and join others.
        `'agree'`: the transformation is reinitialised for all of them, which drops the others'
        moments; `'keep'`: they join at the others' count with zero moments.
      schedules: `'continue'`, or `'restart'`: the schedules of new and changed groups start at 0.
      shardings: the placement of leaves: an `Optimizer` of shardings or a tree like the new
        `param_states`, with `None` for the default. By default kept leaves stay in place, and new
        ones are placed like other state of the parameter, or like the parameter.

    Returns:
      The optimizer and a report: a line for every leaf of the new state, and for those of the old
      one that were dropped.

    Raises:
      SurgeryError: trained leaves would be dropped; a setting that gives the state its meaning has
        changed; an open window or cycle could not be completed; lists them all.
      GroupError: the groups of `new_definition` do not partition the parameters; or values must be
        compared while tracing: call it outside compiled functions; or a value does not fit the new
        dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> from opt_core import MultiOptimizer
      >>> class Momentum(OptimizerDef):
      ...     def init_state(self, params):
      ...         momenta = jax.tree.map(jnp.zeros_like, params)
      ...         return OptimizerState(jnp.zeros((), jnp.int32), momenta)
      >>> optimizer = Momentum(None).create({'w': jnp.ones(2), 'b': jnp.ones(1)})
      >>> rules = [('weights', 'w', Momentum(None)), ('biases', 'b', FROZEN)]
      >>> definition = MultiOptimizer.from_rules(rules)
      >>> optimizer, report = regroup(optimizer, definition, allow={'drop'})
      >>> print(report)
      kept 1
        weights/w
      dropped 1
        b
    """
    if counts not in ("agree", "keep"):
        raise GroupError(f"`counts` must be 'agree' or 'keep', found {counts!r}")
    options = Options(
        allow=check_allowances(allow),
        joins=counts == "keep",
        schedules=_checked(schedules),
        shardings=shardings,
    )
    return _regroup(optimizer, new_definition, options)


def _regroup(
    optimizer: Optimizer, definition: OptimizerDef, options: Options
) -> tuple[Optimizer, ChangeReport]:
    fresh = jax.eval_shape(definition.create, optimizer.target).replace(target=optimizer.target)
    old, new = _side(optimizer), _side(fresh)
    pairing = pair_leaves(old, new, joins=options.joins)
    pairs = _fitting(old, new, pairing.pairs, options)
    if options.schedules == "restart":
        pairs = _restarted(optimizer, fresh, new, pairs)
    move = hazards.Move(old, new, pairs, is_asked=options.is_asked)
    _check(move, options, pairing.unclear)
    return _moved(optimizer, fresh, move, options)


def _side(optimizer: Optimizer) -> Side:
    owners = {names: group for group, names in members(optimizer)}
    leaves = jax.tree.leaves(optimizer.state.param_states)
    description = describe_state(optimizer)
    names = [leaf_path(leaf) for leaf in description.leaves]

    def value(i: int) -> int | None:
        found = value_of(leaves[i], f"`{names[i]}` has to be known")
        is_count = found is not None and found.size == 1 and found.dtype.kind in "iu"
        return int(found.reshape(())) if is_count else None

    def same(positions: Sequence[int]) -> bool:
        return all_equal(leaves[i] for i in positions)

    return Side(description, names, owners, value, same, leaves)


def _fitting(old: Side, new: Side, pairs: Sequence[Pair], options: Options) -> Sequence[Pair]:
    """Removes pairs of leaves whose shapes or kinds of numbers differ."""
    found = []
    for pair, leaf in zip(pairs, new.leaves, strict=True):
        why = next((w for i in pair.sources if (w := options.misfit(old.leaves[i], leaf))), "")
        found.append(dataclasses.replace(pair, sources=(), note=why) if why else pair)
    return found


def _restarted(
    optimizer: Optimizer, fresh: Optimizer, new: Side, pairs: Sequence[Pair]
) -> Sequence[Pair]:
    """Removes the counts of schedules, except in unchanged groups."""
    before, after = dict(leaf_groups(optimizer)), dict(leaf_groups(fresh))
    was = {names: group for group, names in members(optimizer)}
    changed = {group for names, group in new.owners.items() if was.get(names) != group}
    changed |= {was[names] for names in was if new.owners.get(names) != was[names]}
    same = {
        group
        for group, part in after.items()
        if group in before and before[group].optimizer_def == part.optimizer_def
    }
    stays = [any(leaf.group[: len(g)] == g for g in same - changed) for leaf in new.descriptions]
    return [
        pair if keep or leaf.role != "schedule_count" else Pair(note="restarts")
        for pair, leaf, keep in zip(pairs, new.descriptions, stays, strict=True)
    ]


def _check(move: hazards.Move, options: Options, unclear: Iterable[str] = ()) -> None:
    """Raises a `SurgeryError` for everything that is not allowed."""
    parts = ["\n".join(f"  {problem.text}" for problem in hazards.refusals(move))]
    if "drop" not in options.allow and (lost := list(hazards.dropped_leaves(move))):
        parts.append(
            f"trained state would be dropped:\n{listed(lost)}\nTo drop it, pass `allow={{'drop'}}`."
        )
    changed = [*hazards.switches(move), *unclear]
    if "optimizer" not in options.allow and changed:
        parts.append(
            "transformations would continue with state of others that behave differently:\n"
            + "\n".join(f"  {change}" for change in changed)
            + "\nTo continue with it, pass `allow={'optimizer'}`."
        )
    if any(parts):
        raise SurgeryError(
            "the state cannot continue under the new definition:\n"
            + "\n".join(part for part in parts if part)
        )


def _moved(
    optimizer: Optimizer, fresh: Optimizer, move: hazards.Move, options: Options
) -> tuple[Optimizer, ChangeReport]:
    """Makes the new state and the report."""
    old, new = move.old, move.new
    structure: Any = jax.tree.structure(fresh.state.param_states)
    shapes = {name: np.shape(x) for name, x in zip(new.names, new.leaves, strict=True)}
    given = flat_shardings(options.shardings, structure, shapes)
    taken, notes = moved_leaves(optimizer, move, options)
    default = Places(optimizer.target, old.leaves, old.descriptions)
    wanted = [i for i in range(len(new.descriptions)) if i not in taken]
    places: Mapping[int, Any] = {
        i: default.of(new.descriptions[i], np.shape(new.leaves[i]))
        if given[i] is None
        else given[i]
        for i in wanted
    }
    found = options.placed(taken, given) | init_leaves(fresh, wanted, places)
    leaves = [found[i] for i in range(len(new.descriptions))]
    states = unalias(
        structure.unflatten(leaves), apart_from=(optimizer.target, optimizer.state.step)
    )
    state = OptimizerState(optimizer.state.step, states)
    changes = [
        LeafChange(
            options.action(move, i, leaves[i]),
            new.names[i],
            description,
            tuple(old.names[k] for k in pair.sources),
            notes.get(i, pair.note),
        )
        for i, (description, pair) in enumerate(zip(new.descriptions, move.pairs, strict=True))
    ]
    gone = [LeafChange("dropped", old.names[i], old.descriptions[i]) for i in move.dropped]
    return fresh.replace(state=state, target=optimizer.target), ChangeReport((*changes, *gone))


def _checked(schedules: Schedules) -> Schedules:
    if schedules not in ("continue", "restart"):
        raise GroupError(f"`schedules` must be 'continue' or 'restart', found {schedules!r}")
    return schedules
