"""One update of several groups: distributing arguments and collecting results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from opt_core._gradients import check_frozen_gradients, gradient_leaves
from opt_core._groups.overrides import OWN, listed, named
from opt_core._groups.selection import GroupSelection, Selection
from opt_core._groups.states import join_states, split_states
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState, increment_step
from opt_core._paths import Names
from opt_core.errors import UnusedArgumentError
from opt_core.protocols import (
    ResolvesHyperParams,
    TakesArgsOfParams,
    TakesExtraArgs,
    TakesPerExampleGrads,
)

T = TypeVar("T")


def update_groups(
    selection: Selection,
    optimizer: Optimizer,
    grads: Any,
    *,
    method: Literal["apply_gradient", "compute_updates"],
    hyper_params: Sequence[Any],
    extra_args: Mapping[str, Any],
) -> tuple[Any, OptimizerState]:
    """Returns the new parameters, or the updates, and the new state; see `MultiOptimizer`.

    Args:
      selection: the groups of the parameters.
      optimizer: of a `MultiOptimizer`, before the update.
      grads: pytree like the parameters; frozen leaves may be `None` or missing.
      method: of each group's definition.
      hyper_params: one dataclass per group that is not frozen, in order.
      extra_args: passed to the definitions that use them.
    """
    definition: Any = optimizer.optimizer_def
    before = jax.tree.leaves(optimizer.target)
    results = list(before)
    if method == "compute_updates":
        for i in selection.frozen:
            results[i] = jnp.zeros_like(results[i])
    gradients = _checked_gradients(selection, optimizer, grads)
    states, used = [], frozenset[str]()
    rows = zip(
        selection.trained,
        definition.sub_optimizers,
        hyper_params,
        split_states(selection, definition.sub_optimizers, before, optimizer.state.param_states),
        strict=True,
    )
    for part, own, hyper, own_states in rows:
        own_state = OptimizerState(optimizer.state.step, own_states)
        operands = (hyper, part.cut(before), own_state, part.cut(gradients))
        taken = _of_group(own, _extra_args_of(own, extra_args), (selection, part, before))
        with named(part.group.name):
            update = functools.partial(getattr(own, method), *operands)
            (new, own_state), acted = _call_with(update, taken)
        used |= acted
        part.paste(new, results)
        states.append(own_state.param_states)
    _check_used(extra_args, used)
    step = increment_step(optimizer.state.step)
    new_state = OptimizerState(step, join_states(selection, states))
    return selection.treedef.unflatten(results), new_state


def resolve_groups(
    selection: Selection,
    optimizers: Sequence[Optimizer],
    leaves: Sequence[Any],
    *,
    hyper_params: Sequence[Any],
    extra_args: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the hyper-parameters of an update; see `MultiOptimizer.resolve_hyper_params`.

    Args:
      selection: the groups of the parameters.
      optimizers: of the groups that are not frozen.
      leaves: the parameters, in order.
      hyper_params: one dataclass per group that is not frozen, in order.
      extra_args: passed to the definitions that use them.
    """
    found, used = {}, frozenset[str]()
    for part, own, hyper in zip(selection.trained, optimizers, hyper_params, strict=True):
        definition = own.optimizer_def
        if not isinstance(definition, ResolvesHyperParams):
            found[part.group.name] = hyper
            continue
        taken = _of_group(
            definition, _extra_args_of(definition, extra_args), (selection, part, leaves)
        )
        resolve = functools.partial(definition.resolve_hyper_params, hyper, own.target, own.state)
        with named(part.group.name):
            found[part.group.name], acted = _call_with(resolve, taken)
        used |= acted
    _check_used(extra_args, used)
    return found


def takes_per_example_grads(selection: Selection, optimizer: Optimizer, grads: Any) -> bool:
    """Returns whether some definition takes the gradients of its group per example."""
    definition: Any = optimizer.optimizer_def
    gradients = gradient_leaves(optimizer.target, grads, _needed(selection))
    leaves = jax.tree.leaves(optimizer.target)
    rows = zip(
        selection.trained,
        definition.sub_optimizers,
        split_states(selection, definition.sub_optimizers, None, optimizer.state.param_states),
        strict=True,
    )
    return any(
        isinstance(own, TakesPerExampleGrads)
        and own.takes_per_example_grads(
            part.cut(leaves), OptimizerState(optimizer.state.step, states), part.cut(gradients)
        )
        for part, own, states in rows
    )


def _needed(selection: Selection) -> set[Names]:
    return {selection.paths[i] for part in selection.trained for i in part.members}


def _checked_gradients(selection: Selection, optimizer: Optimizer, grads: Any) -> list[Any]:
    gradients = gradient_leaves(optimizer.target, grads, _needed(selection))
    leaves = jax.tree.leaves(optimizer.target)
    check_frozen_gradients(
        ((selection.paths[i], leaves[i], gradients[i]) for i in selection.frozen),
        is_per_example=lambda: takes_per_example_grads(selection, optimizer, grads),
    )
    return gradients


def extra_arg_names(definitions: Sequence[OptimizerDef], names: Iterable[str]) -> frozenset[str]:
    """Returns those of `names` that some definition takes in its update and none overrides."""
    asked = frozenset(names) - OWN
    taken = frozenset[str]().union(
        *(d.extra_arg_names(asked) for d in definitions if isinstance(d, TakesExtraArgs))
    )
    return frozenset(n for n in taken if not any(d.has_hyper_param(n) for d in definitions))


def args_of_params(definitions: Sequence[OptimizerDef], names: Iterable[str]) -> frozenset[str]:
    """Returns those of `names` that refer to the parameters for some definition."""
    asked = frozenset(names)
    takers = (d.args_of_params(asked) for d in definitions if isinstance(d, TakesArgsOfParams))
    return frozenset[str]().union(*takers)


def _extra_args_of(definition: OptimizerDef, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments that one definition takes."""
    if not extra_args or not isinstance(definition, TakesExtraArgs):
        return {}
    return {name: extra_args[name] for name in definition.extra_arg_names(extra_args)}


def _of_group(
    definition: OptimizerDef,
    extra_args: Mapping[str, Any],
    group: tuple[Selection, GroupSelection, Sequence[Any]],
) -> dict[str, Any]:
    """Returns extra arguments as one group's definition needs them.

    A group has a part of the parameters. In functions of the parameters the others keep their
    values from before the update.

    Args:
      definition: the group's.
      extra_args: what it takes.
      group: the groups of the parameters, its part of them, and all of them in order.
    """
    if not isinstance(definition, TakesArgsOfParams):
        return dict(extra_args)
    selection, part, leaves = group

    def cut(value: Any) -> Any:
        is_whole = jax.tree.structure(value) == selection.treedef
        return part.cut(jax.tree.leaves(value)) if is_whole else value

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # a line search looks at its signature
        def of_own(params: Any, *args: Any, **kwargs: Any) -> Any:
            whole = list(leaves)
            part.paste(params, whole)
            return cut(function(selection.treedef.unflatten(whole), *args, **kwargs))

        return of_own

    about = definition.args_of_params(extra_args)
    return {
        name: value if name not in about else inside(value) if callable(value) else cut(value)
        for name, value in extra_args.items()
    }


def _call_with(
    function: Callable[..., T], extra_args: Mapping[str, Any]
) -> tuple[T, frozenset[str]]:
    """Calls a method of one group's definition.

    A transformation that accepts any keyword shows only when traced that it does not use one.
    Another group may.

    Args:
      function: the method, which only lacks extra arguments.
      extra_args: those that the definition takes.

    Returns:
      Its result, and the names of the arguments that were used.
    """
    taken = dict(extra_args)
    while True:
        try:
            return function(**taken), frozenset(taken)
        except UnusedArgumentError as error:
            if not error.names & taken.keys():
                raise
            taken = {name: value for name, value in taken.items() if name not in error.names}


def _check_used(extra_args: Mapping[str, Any], used: frozenset[str]) -> None:
    """Raises an `UnusedArgumentError` for arguments that no group used."""
    if unused := sorted(extra_args.keys() - used):
        raise UnusedArgumentError(
            f"{listed(unused)}: neither a hyper-parameter nor an extra argument that any group "
            "uses",
            unused,
        )
