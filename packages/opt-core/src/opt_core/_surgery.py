"""Changing the groups of an optimizer that has been trained, keeping the state that still fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._aliasing import unalias
from opt_core._groups import FROZEN, But, Group, Names, Rest
from opt_core._multi_optimizer import MultiOptimizer
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._paths import path_str
from opt_core._selection import positions_of
from opt_core._state_entries import Entry, entries, leaf_groups, members
from opt_core.errors import GroupError


@dataclasses.dataclass(frozen=True)
class SurgeryReport:
    """What became of the leaves of an optimizer's state.

    Attributes:
      kept: their paths in the new `param_states`; the arrays are the old ones.
      created: paths in the new `param_states` that start anew.
      dropped: paths in the old `param_states` that nothing took over.
    """

    kept: tuple[str, ...]
    created: tuple[str, ...]
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        parts = (("kept", self.kept), ("created", self.created), ("dropped", self.dropped))
        return "\n".join(
            line
            for word, paths in parts
            for line in (f"{word} {len(paths)}", *(f"  {path}" for path in paths))
        )


def reset(optimizer: Optimizer, group: str) -> tuple[Optimizer, SurgeryReport]:
    """Starts the state of one group anew; parameters and `step` stay.

    Args:
      optimizer: one of a `MultiOptimizer`.
      group: the group's name; `outer/inner` for a group of a nested one.

    Returns:
      The optimizer and a report; the state of the other groups is kept.

    Raises:
      GroupError: there is no such group, or it is frozen and has no state.
    """
    names = tuple(group.split("/"))
    fresh = optimizer.replace(state=optimizer.optimizer_def.init_state(optimizer.target))
    old, new = entries(optimizer), entries(fresh)
    definition = optimizer.optimizer_def
    for depth, name in enumerate(names):
        known = definition.group_names if isinstance(definition, MultiOptimizer) else ()
        if not isinstance(definition, MultiOptimizer) or name not in known:
            frozen = isinstance(definition, MultiOptimizer) and any(
                g.name == name for g in definition.groups
            )
            raise GroupError(
                f"`{'/'.join(names[: depth + 1])}` "
                + ("is frozen and has no state to reset" if frozen else "is no group")
                + f"; the groups with a state are {_listed(known)}"
            )
        definition = definition.sub_optimizers[known.index(name)]
    chosen = [entry.group[: len(names)] == names for entry in new]
    leaves = [(n if c else o).leaf for c, o, n in zip(chosen, old, new, strict=True)]
    paths = tuple(entry.path for entry, c in zip(new, chosen, strict=True) if c)
    kept = tuple(entry.path for entry, c in zip(new, chosen, strict=True) if not c)
    return _with_leaves(optimizer, fresh, leaves), SurgeryReport(kept, paths, paths)


def freeze(
    optimizer: Optimizer, pattern: Any, *, name: str = "frozen"
) -> tuple[Optimizer, SurgeryReport]:
    """Stops updating the leaves that a pattern matches, and drops their state.

    Args:
      optimizer: of any definition; one without groups becomes a `MultiOptimizer`, whose group
        `'rest'` it is.
      pattern: see `MultiOptimizer.from_rules`.
      name: what the new group is called; a number is added where there is one already.

    Returns:
      The optimizer and a report.

    Raises:
      GroupError: the pattern matches nothing.
    """
    definition = _as_groups(optimizer.optimizer_def)
    chosen = _positions(definition, optimizer.target, pattern)
    groups = _carved(definition, optimizer.target, pattern, chosen)
    frozen = Group(_unused(name, groups), pattern, FROZEN)
    return regroup(optimizer, definition.with_groups([frozen, *groups]))


def unfreeze(
    optimizer: Optimizer, pattern: Any, definition: OptimizerDef, *, name: str = "unfrozen"
) -> tuple[Optimizer, SurgeryReport]:
    """Updates frozen leaves from now on.

    Args:
      optimizer: one of a `MultiOptimizer`.
      pattern: which leaves; see `MultiOptimizer.from_rules`. Those that are frozen inside a nested
        `MultiOptimizer` leave it.
      definition: how they are updated. Their state starts anew.
      name: what the new group is called; a number is added where there is one already.

    Returns:
      The optimizer and a report.

    Raises:
      GroupError: the pattern matches nothing, or leaves that are not frozen; lists these.
    """
    whole = _as_groups(optimizer.optimizer_def)
    chosen = _positions(whole, optimizer.target, pattern)
    paths = whole.select(optimizer.target).paths
    owners = {names: group for group, names in members(optimizer)}
    if busy := [
        f"  `{path_str(paths[i])}` belongs to {_shown(whole, owners[paths[i]])}"
        for i in sorted(chosen)
        if paths[i] in owners
    ]:
        raise GroupError(
            "`pattern` matches leaves that are not frozen:\n"
            + "\n".join(busy)
            + "\nMake it narrower, or take `regroup` to move them."
        )
    groups = _carved(whole, optimizer.target, pattern, chosen)
    new = Group(_unused(name, groups), pattern, definition)
    return regroup(optimizer, whole.with_groups([new, *groups]))


def regroup(
    optimizer: Optimizer,
    new_definition: OptimizerDef,
    *,
    counts: Literal["agree", "keep"] = "agree",
) -> tuple[Optimizer, SurgeryReport]:
    """Goes on with another definition, keeping every state that still fits.

    A leaf of the state fits where the new state has one for the same parameter, in the same place
    of the same types, of the same shape and dtype (as JAX holds it): the moments of Adam fit AdamW,
    not AdaBelief. What a group keeps for all its leaves, such as a count, is kept where all the
    groups that they come from have it and agree about it. Where they do not, the whole new group
    starts anew: Adam's first steps would be several times too long where moments of zero meet a
    large count.
    Hyper-parameters that a state records (`optax.inject_hyperparams`) are the new definition's,
    unless the definition is the same.

    Args:
      optimizer: of any definition.
      new_definition: any definition. Parameters and `step` stay as they are.
      counts: `'agree'`, or `'keep'`: leaves that were frozen, or come from a group without a count,
        join those that have one at their count, with moments of zero.

    Returns:
      The optimizer and a report of what was kept, created and dropped.

    Raises:
      GroupError: the groups of `new_definition` do not divide the parameters; or states have to be
        compared while tracing: regroup outside of compiled functions. Or a value of 64 bits does
        not survive the 32 that JAX holds.

    Examples:
      >>> import jax.numpy as jnp
      >>> class Momentum(OptimizerDef):
      ...     def init_state(self, params):
      ...         momenta = jax.tree.map(jnp.zeros_like, params)
      ...         return OptimizerState(jnp.zeros((), jnp.int32), momenta)
      >>> optimizer = Momentum(None).create({'w': jnp.ones(2), 'b': jnp.ones(1)})
      >>> rules = [('weights', 'w', Momentum(None)), ('biases', 'b', FROZEN)]
      >>> optimizer, report = regroup(optimizer, MultiOptimizer.from_rules(rules))
      >>> report
      SurgeryReport(kept=('w',), created=(), dropped=('b',))
    """
    if counts not in ("agree", "keep"):
        raise GroupError(f"`counts` must be 'agree' or 'keep', found {counts!r}")
    fresh = new_definition.create(optimizer.target)
    fresh = fresh.replace(target=optimizer.target)
    old, new = entries(optimizer), entries(fresh)
    by_role = {entry.kind: entry for entry in old if entry.role.param is not None}
    found = [by_role.get(entry.kind) for entry in new]
    shared = _shared(optimizer, old, fresh, new, counts)
    conflicted = {group for group, entry in shared.items() if entry is None}
    taken: list[Entry | None] = []
    for entry, source in zip(new, found, strict=True):
        if entry.group in conflicted:
            source = None
        elif entry.role.param is None:
            source = (shared.get(entry.group) or {}).get(entry.kind)
        taken.append(source)
    pairs = list(zip(new, taken, strict=True))
    used = {source.path for source in taken if source is not None}
    report = SurgeryReport(
        tuple(entry.path for entry, source in pairs if source is not None),
        tuple(entry.path for entry, source in pairs if source is None),
        tuple(entry.path for entry in old if entry.path not in used),
    )
    leaves = [new.leaf if source is None else source.for_place(new) for new, source in pairs]
    return _with_leaves(optimizer, fresh, leaves), report


def _shared(
    optimizer: Optimizer,
    old: Sequence[Entry],
    fresh: Optimizer,
    new: Sequence[Entry],
    counts: str,
) -> dict[Names, dict[Any, Entry] | None]:
    """What each new group takes of that which belongs to no parameter; `None` where sources differ.

    The sources of a group are the old groups that its leaves come from; `None` is one where a leaf
    was frozen.
    """
    owners = {names: group for group, names in members(optimizer)}
    before = {group: part.optimizer_def for group, part in leaf_groups(optimizer)}
    after = {group: part.optimizer_def for group, part in leaf_groups(fresh)}
    sources: dict[Names, dict[Names | None, None]] = {}
    for group, names in members(fresh):
        sources.setdefault(group, {})[owners.get(names)] = None
    by_group: dict[tuple[Names | None, Any], Entry] = {
        (entry.group, entry.kind): entry for entry in old if entry.role.param is None
    }
    found: dict[Names, dict[Any, Entry] | None] = {}
    for entry in new:
        if entry.role.param is not None:
            continue
        agreed = found.setdefault(entry.group, {})
        own = sources.get(entry.group, {})
        given = [x for source in own if (x := by_group.get((source, entry.kind))) is not None]
        if not given or agreed is None:
            continue
        if entry.is_hyper_param:
            # One that was changed at run time outlives surgery; another definition's does not.
            unchanged = all(s is not None and before[s] == after[entry.group] for s in own)
            if unchanged and _agree(given):
                agreed[entry.kind] = given[0]
        elif (len(given) < len(own) and counts == "agree") or not _agree(given):
            found[entry.group] = None
        else:
            agreed[entry.kind] = given[0]
    return found


def _agree(found: Sequence[Entry]) -> bool:
    return all(_same(found[0].leaf, other.leaf) for other in found[1:])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        raise GroupError(
            "states of several groups have to be compared, which cannot be done while tracing: "
            "call `regroup` outside of compiled functions"
        )
    if isinstance(a, jax.ShapeDtypeStruct) or isinstance(b, jax.ShapeDtypeStruct):
        return True
    if jnp.issubdtype(getattr(a, "dtype", float), jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def _with_leaves(optimizer: Optimizer, fresh: Optimizer, leaves: Sequence[Any]) -> Optimizer:
    states = jax.tree.unflatten(jax.tree.structure(fresh.state.param_states), leaves)
    states = unalias(states, apart_from=(optimizer.target, optimizer.state.step))
    state = OptimizerState(optimizer.state.step, states)
    return fresh.replace(state=state, target=optimizer.target)


def _as_groups(definition: OptimizerDef) -> MultiOptimizer:
    if isinstance(definition, MultiOptimizer):
        return definition
    return MultiOptimizer.from_rules([], rest=definition)


def _positions(definition: MultiOptimizer, target: Any, pattern: Any) -> frozenset[int]:
    if isinstance(pattern, Rest):
        raise GroupError("`REST` says nothing alone; give a pattern")
    found = positions_of(pattern, target, definition.param_axes)
    if not found:
        raise GroupError(f"{Group('pattern', pattern, FROZEN)} matches no parameter")
    return found


def _carved(
    definition: MultiOptimizer, target: Any, pattern: Any, chosen: frozenset[int]
) -> list[Group]:
    """The table without the chosen leaves; a group that loses all is left out, but for the rest."""
    selection = definition.select(target)
    leaves = jax.tree.leaves(target)
    groups = []
    for part in selection.parts:
        group, taken = part.group, chosen.intersection(part.members)
        if not taken or isinstance(group.pattern, Rest):
            groups.append(_carve_inside(group, part, leaves, taken))
        elif len(taken) < len(part.members):
            inside = _carve_inside(group, part, leaves, taken)
            groups.append(dataclasses.replace(inside, pattern=But(group.pattern, pattern)))
    return groups


def _carve_inside(group: Group, part: Any, leaves: Sequence[Any], taken: frozenset[int]) -> Group:
    """The group, where its definition is nested without the groups that lose all their leaves."""
    nested = group.definition
    if not isinstance(nested, MultiOptimizer) or not taken:
        return group
    own = [leaves[i] for i in part.members]
    inner = nested.select(part.cut(leaves))
    kept = []
    for share in inner.parts:
        left = [i for i in share.members if part.members[i] not in taken]
        if left or isinstance(share.group.pattern, Rest):
            inside = frozenset(i for i in share.members if part.members[i] in taken)
            kept.append(_carve_inside(share.group, share, own, inside))
    return dataclasses.replace(group, definition=nested.with_groups(kept))


def _shown(definition: MultiOptimizer, names: Names) -> str:
    """A group for people to read; one of a nested definition by its names alone."""
    if len(names) > 1:
        return f"`{'/'.join(names)}`"
    name = names[0] if names else "rest"
    return str(next(group for group in definition.groups if group.name == name))


def _unused(name: str, groups: Sequence[Group]) -> str:
    names = {group.name for group in groups}
    candidates = (name if n == 1 else f"{name}_{n}" for n in range(1, len(names) + 2))
    return next(candidate for candidate in candidates if candidate not in names)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
