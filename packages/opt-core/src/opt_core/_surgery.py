"""Changing the optimizer of a trained state: doors to the planner that edit the table of groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.table import FROZEN, Except, Group, Rest, pattern_str, positions_of
from opt_core._optimizer import Optimizer, OptimizerDef, Params
from opt_core._plan.leaves import HeldState, LeafInfo, Side, View, named_view, source_side
from opt_core._plan.match import make_plan
from opt_core._plan.plan import Plan, Request, Schedules, check_allowances
from opt_core._plan.rules import Rule
from opt_core._plan.stored import read_storages
from opt_core._trees import Names, listed, named_leaves, path_str
from opt_core.errors import GroupError, LeafError


def regroup(
    optimizer: Optimizer[Params],
    definition: OptimizerDef,
    *,
    allow: Iterable[str] = (),
    rules: Sequence[Rule] = (),
    schedules: Schedules = "continue",
    placement: Any = None,
) -> tuple[Optimizer[Params], Plan[Optimizer[Params]]]:
    """Continues with another definition, keeping every leaf of the state that has the same meaning.

    Leaves are the same thing if their descriptions agree (`describe_state`): transformation, field,
    parameter, and the parameter dimensions that they keep. Positions in a chain, wrappers and
    classes do not matter; equal shapes are not enough.

    State that a group keeps for all its parameters, such as a count, is taken from the groups that
    they come from, if these agree. The counts of schedules continue: a new schedule starts at
    `optimizer.state.step`, or inside a window of mini-steps at the number of updates. Settings
    recorded in the state take the new definition's value if the definition has changed it;
    otherwise a value set at run time is kept.

    Args:
      optimizer: of any definition; arrays, or shapes alone for a plan of shapes.
      definition: any definition. Parameters and `step` are not changed.
      allow: changes that have to be asked for: `'drop'` trained state without a successor,
        `'initialise'` moments that begin at zero for parameters that were trained, `'optimizer'`
        moments that go on under other mathematics, `'reshape'` a leaf to another shape of the same
        size, `'cast'` another dtype of anything but moments.
      rules: what becomes of single leaves: pairs of a regular expression, which has to match a
        whole name such as `state/adam/mu/w`, and an action; see `Rename`, `Map` and others.
      schedules: `'continue'`, or `'restart'`: the schedules of new and changed groups start at 0.
      placement: the placement of new leaves: a memory plan, or trees of shardings. By default kept
        leaves stay in place, and new ones are placed like other state of the parameter, or like the
        parameter.

    Returns:
      The optimizer, and the plan behind it: a row for every leaf.

    Raises:
      SurgeryError: trained leaves would be dropped; a setting that gives the state its meaning has
        changed; an open window or cycle could not be completed; lists them all.
      GroupError: the groups of `definition` do not partition the parameters.
      LeafError: a value does not fit the new dtype.

    Examples:
      >>> import jax.numpy as jnp
      >>> from opt_core import MultiOptimizer, OptimizerState
      >>> class Momentum(OptimizerDef):
      ...     def init_state(self, params):
      ...         momenta = jax.tree.map(jnp.zeros_like, params)
      ...         return OptimizerState(jnp.zeros((), jnp.int32), momenta)
      >>> optimizer = Momentum(None).create({'w': jnp.ones(2), 'b': jnp.ones(1)})
      >>> groups = [('weights', 'w', Momentum(None)), ('biases', 'b', FROZEN)]
      >>> definition = MultiOptimizer.from_rules(groups)
      >>> optimizer, plan = regroup(optimizer, definition, allow={'drop'})
      >>> len(plan.initialised), len(plan.dropped)
      (0, 1)
    """
    request = Request.make(allow, rules, schedules=schedules)
    return _carried_out(_held(optimizer), _created(optimizer, definition), request, placement)


def freeze(
    optimizer: Optimizer[Params], pattern: Any, *, name: str = "frozen", allow: Iterable[str] = ()
) -> tuple[Optimizer[Params], Plan[Optimizer[Params]]]:
    """Stops updating the leaves that a pattern matches, and drops their state.

    Dropping is implied by freezing, so nothing needs to be allowed; the plan lists what was
    dropped.

    Args:
      optimizer: of any definition; one without groups becomes the group `'rest'` of a
        `MultiOptimizer`.
      pattern: see `MultiOptimizer.from_rules`.
      name: of the new group; a number is appended if it is taken.
      allow: see `regroup`. `'optimizer'` allows numbers computed from all parameters, such as an
        estimated rate, to continue without the frozen ones.

    Returns:
      The optimizer and the plan.

    Raises:
      GroupError: the pattern matches nothing; or it takes all parameters of a group inside a
        transformation, such as `chain(clip, groups)`: write the new definition for `regroup`.
      SurgeryError: its parameters are perturbed (`optax.contrib.sam`) and could not be restored; or
        numbers computed from all parameters would continue.
    """
    target = _created_with(optimizer, Group(name, pattern, FROZEN))
    # Parameters are kept as they are; a float32 copy of them is state.
    request = Request.make(check_allowances(allow) | {"cast", "drop"}, discards_state=True)
    return _carried_out(_held(optimizer), target, request)


def unfreeze(
    optimizer: Optimizer[Params],
    pattern: Any,
    definition: OptimizerDef,
    *,
    name: str = "unfrozen",
    schedules: Schedules = "continue",
    placement: Any = None,
) -> tuple[Optimizer[Params], Plan[Optimizer[Params]]]:
    """Starts updating frozen leaves.

    Args:
      optimizer: one of a `MultiOptimizer`.
      pattern: the leaves; see `MultiOptimizer.from_rules`. Those that are frozen inside a nested
        `MultiOptimizer` leave it.
      definition: how they are updated. Their state is new, except for the counts of schedules.
      name: of the new group; a number is appended if it is taken.
      schedules: `'continue'`: the new group's schedules start at the current step; `'restart'`:
        they start at 0.
      placement: see `regroup`.

    Returns:
      The optimizer and the plan.

    Raises:
      GroupError: the pattern matches nothing, or leaves that are not frozen; lists these.
    """
    target = _created_with(optimizer, Group(name, pattern, definition))
    request = Request.make({"cast"}, schedules=schedules)  # of parameters to what is kept of them
    return _carried_out(_held(optimizer), target, request, placement)


def reset(
    optimizer: Optimizer[Params], group: str, *, placement: Any = None
) -> tuple[Optimizer[Params], Plan[Optimizer[Params]]]:
    """Reinitialises the state of one group; parameters, `step` and counts of schedules stay.

    So do settings recorded in the state, such as a learning rate set at run time, and the number of
    updates of a window of mini-steps, which drives the schedules inside it. Only that group's state
    is created, with every leaf placed like the one it replaces.

    Args:
      optimizer: one of a `MultiOptimizer`.
      group: the name of the group; `outer/inner` for a group of a nested one.
      placement: see `regroup`.

    Returns:
      The optimizer and the plan; the state of the other groups is kept.

    Raises:
      GroupError: there is no such group, or it is frozen and has no state.
      SurgeryError: its parameters are perturbed (`optax.contrib.sam`) and could not be restored.
    """
    names = group_of(optimizer.optimizer_def, group)
    held = _held(optimizer)
    side = source_side(held, held.schema)
    # Digits of parameters that are kept besides them belong to the parameters.
    digits = {name for name, how in read_storages(held.schema).items() if not how.fields}
    initialised = {
        name
        for name, leaf in side.leaves.items()
        if leaf.group[: len(names)] == names
        and leaf.stored not in digits
        and not _stays(side, leaf)
    }
    request = Request.make({"drop"}, reset=initialised, discards_state=True)
    # The shapes are those of the state: nothing else is created, nor traced.
    target = optimizer.replace(state=_shapes(optimizer.state))
    return _carried_out(held, target, request, placement)


def _stays(side: Side, leaf: LeafInfo) -> bool:
    """Whether a leaf records the progress or a setting of the training, not what it has learnt."""
    is_time = leaf.role == "schedule_count" or side.counts_updates(leaf)
    return is_time or side.is_recorded(leaf)


def _created_with(optimizer: Optimizer, group: Group) -> Optimizer:
    """`_created` of the definition with another group before the others."""
    definition = with_group(optimizer, group)
    definition.select(optimizer.target)
    try:
        return _created(optimizer, definition)
    except GroupError as error:  # of a `MultiOptimizer` in a chain, which functions have captured
        lines = [line for line in str(error).splitlines() if line.startswith("  ")]
        raise GroupError(
            "all parameters of a group inside a transformation would leave it, and such a "
            "group cannot be removed:\n"
            + "\n".join(lines)
            + "\nWrite the new definition, with `FROZEN` or another definition for these "
            "parameters, and call `regroup(..., allow={'drop', 'optimizer'})`."
        ) from error


def _created(optimizer: Optimizer, definition: OptimizerDef) -> Optimizer:
    """Another definition's optimizer of the same parameters; its state is shapes."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer`: expected an `Optimizer`, found {type(optimizer).__name__}")
    if not isinstance(definition, OptimizerDef):
        raise TypeError(
            f"`definition`: expected an `OptimizerDef`, found {type(definition).__name__}; of a "
            "transformation of Optax, `opt_optax_bridge.OptaxWrapper(tx)` is one"
        )
    created: Optimizer = jax.eval_shape(definition.create, optimizer.target)
    return created.replace(target=optimizer.target, state=_shapes(created.state))


def _shapes(state: Any) -> Any:
    """A state without values, and without shardings that explicit meshes give to shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), state)


def _held(optimizer: Optimizer) -> HeldState:
    """The leaves of an optimizer that goes on as another."""
    leaves = jax.tree.leaves(optimizer)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise GroupError(
            "the groups of an optimizer change outside of compiled functions: what becomes of its "
            "state depends on values, such as counts; found tracers"
        )
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise LeafError("`optimizer`: an array has been deleted, as a step does that donates it")
    named = named_view(View(optimizer))
    return HeldState(named.leaves, named.schema)


def _carried_out(
    held: HeldState, target: Optimizer, request: Request, placement: Any = None
) -> tuple[Optimizer, Plan[Optimizer]]:
    plan: Plan[Optimizer] = make_plan(held, View(target), request, placement)
    return plan.apply(), plan


# The table of groups.


def with_group(optimizer: Optimizer, group: Group) -> MultiOptimizer:
    """Returns the definition with a group before the others, which have its leaves no longer."""
    definition, target, pattern = optimizer.optimizer_def, optimizer.target, group.pattern
    if not isinstance(definition, MultiOptimizer):
        definition = MultiOptimizer.from_rules([], rest=definition)
    chosen = _matching_leaves(definition, target, pattern)
    if not group.is_frozen:
        _check_frozen(optimizer, definition, chosen)
    groups = _carved(definition, target, chosen, pattern)
    names = {group.name for group in groups}
    numbers = (group.name, *(f"{group.name}_{n}" for n in range(2, len(names) + 2)))
    name = next(name for name in numbers if name not in names)
    return definition.with_groups([dataclasses.replace(group, name=name), *groups])


def _matching_leaves(definition: MultiOptimizer, target: Any, pattern: Any) -> frozenset[int]:
    """The positions of the leaves that a pattern matches: a `GroupError` if none."""
    if isinstance(pattern, Rest):
        raise GroupError("`REST` says nothing alone; give a pattern")
    positions = positions_of(pattern, target, definition.param_axes)
    if not positions:
        raise GroupError(
            f"{Group('pattern', pattern, FROZEN)} matches no parameter{_hint(definition, pattern)}"
        )
    return positions


def _hint(definition: MultiOptimizer, pattern: Any) -> str:
    advice = ". A pattern matches whole paths of parameters, such as 'encoder/.*', not groups"
    known = [group for group in definition.groups if not isinstance(group.pattern, Rest)]
    same = next((group for group in known if group.name == pattern), None)
    if same is not None:
        return f"{advice}. For that group give its pattern, {pattern_str(same.pattern)}"
    names = listed(group.name for group in known)
    return f"{advice}. The groups are {names}" if known else advice


def _check_frozen(optimizer: Optimizer, definition: MultiOptimizer, chosen: frozenset[int]) -> None:
    paths = definition.select(optimizer.target).paths
    parts = optimizer.optimizer_def.leaf_groups(optimizer)
    owners = {names: group for group, part in parts for names, _ in named_leaves(part.target)}
    if busy := [
        f"  `{path_str(paths[i])}` belongs to {_shown(definition, owners[paths[i]])}"
        for i in sorted(chosen)
        if paths[i] in owners
    ]:
        raise GroupError(
            "`pattern` matches leaves that are not frozen:\n"
            + "\n".join(busy)
            + "\nMake it narrower, or take `regroup` to move them."
        )


def _shown(definition: MultiOptimizer, names: Names) -> str:
    """A group as text; one of a nested definition only by its names."""
    if len(names) > 1:
        return f"`{'/'.join(names)}`"
    name = names[0] if names else "rest"
    return str(next(group for group in definition.groups if group.name == name))


def _carved(
    definition: MultiOptimizer, target: Any, chosen: frozenset[int], pattern: Any
) -> list[Group]:
    """The table without the chosen leaves; empty groups other than the rest are removed."""
    division = definition.select(target)
    groups = []
    for group in definition.groups:
        members, is_rest = division.members[group.name], isinstance(group.pattern, Rest)
        taken = chosen.intersection(members)
        if taken and len(taken) == len(members) and not is_rest:
            continue
        if taken and isinstance(nested := group.definition, MultiOptimizer):
            inside = frozenset(members.index(i) for i in taken)
            # It does not see the chosen leaves: its patterns stay as they are.
            inner = _carved(nested, division.cut(group.name, target), inside, None)
            group = dataclasses.replace(group, definition=nested.with_groups(inner))
        if taken and not is_rest and pattern is not None:
            group = dataclasses.replace(group, pattern=Except(group.pattern, pattern))
        groups.append(group)
    return groups


def group_of(definition: OptimizerDef, group: str) -> Names:
    """Returns the names along `outer/inner`; a `GroupError` unless that group has a state."""
    names = tuple(group.split("/"))
    for depth, name in enumerate(names, 1):
        groups = definition.groups if isinstance(definition, MultiOptimizer) else ()
        trained = {row.name: row.definition for row in groups if not row.is_frozen}
        if name not in trained:
            is_frozen = any(row.name == name for row in groups)
            raise GroupError(
                f"`{'/'.join(names[:depth])}` "
                + ("is frozen and has no state to reset" if is_frozen else "is not a group")
                + f"; the groups with a state are {listed(trained)}"
            )
        definition = trained[name]
    return names
