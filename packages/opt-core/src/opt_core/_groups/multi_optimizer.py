"""Several definitions over one tree of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from opt_core._aliasing import unalias
from opt_core._description.values import StateDescription
from opt_core._groups import overrides as hypers
from opt_core._groups.axes import derive_axes
from opt_core._groups.description import describe_groups
from opt_core._groups.grouped import Grouped
from opt_core._groups.state_dict import (
    GroupOptimizer,
    group_optimizers,
    is_merged,
    is_whole,
    match_groups,
    read_list_layout,
    target_dict,
    write_states,
)
from opt_core._groups.states import join_states
from opt_core._groups.updates import (
    args_of_params,
    extra_arg_names,
    resolve_groups,
    takes_per_example_grads,
    update_groups,
)
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._report import RestoreReport


class MultiOptimizer(Grouped):
    """Several definitions over disjoint groups of the parameters.

    Every definition sees a tree with only the leaves of its group. Leaves without a group are
    frozen: they have no state, are returned unchanged, and need no gradient.

    Args:
      *traversals_and_optimizers: pairs of a pattern and a definition, or one sequence of them. A
        pattern is a traversal with `iterate` and `update` (`flax.traverse_util`), or what
        `from_rules` takes.
      names: of the groups; by default `'0'`, `'1'`, ...
      rest: the definition of the leaves that no pattern matches; `FROZEN` by default, as in Flax.

    Attributes:
      groups: the table, frozen groups included.
      sub_optimizers: the definitions, in order, of the groups that are not frozen.
      traversals: their patterns.
      hyper_params: their hyper-parameters, a tuple.

    Raises:
      GroupError: two groups have one name. When an optimizer is created: a leaf is matched twice,
        or a pattern matches nothing; lists all of them.

    Examples:
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(jnp.zeros((), jnp.int32), ())
      ...     def apply_gradient(self, hyper_params, params, state, grads):
      ...         rate = self.hyper_params
      ...         return jax.tree.map(lambda p, g: p - rate * g, params, grads), state
      >>> definition = MultiOptimizer((r'.*kernel', Sgd(0.5)), (r'.*bias', Sgd(0.25)))
      >>> params = {'kernel': jnp.ones(1), 'bias': jnp.ones(1), 'scale': jnp.ones(1)}
      >>> optimizer = definition.create(params)
      >>> optimizer = optimizer.apply_gradient({'kernel': jnp.ones(1), 'bias': jnp.ones(1)})
      >>> {name: float(value[0]) for name, value in optimizer.target.items()}
      {'bias': 0.75, 'kernel': 0.5, 'scale': 1.0}
    """

    def split(self, optimizer: Optimizer) -> dict[str, Optimizer]:
        """Returns an optimizer per group that is not frozen, as its definition sees it.

        Args:
          optimizer: one of this definition.

        Examples:
          >>> from opt_core import GroupStates
          >>> definition = MultiOptimizer(('w', OptimizerDef(None)), names=['weights'])
          >>> params = {'w': jnp.ones(2), 'b': jnp.ones(1)}
          >>> state = OptimizerState(jnp.int32(3), GroupStates({'weights': {'w': jnp.zeros(2)}}))
          >>> definition.split(Optimizer(definition, state, params))['weights'].target.keys()
          dict_keys(['w'])
        """
        shared = self._group_optimizers(optimizer.target, optimizer.state)
        return {group.name: group.optimizer for group in shared}

    def _group_optimizers(self, target: Any, state: OptimizerState) -> list[GroupOptimizer]:
        return list(
            group_optimizers(self._selection_like(target), self.sub_optimizers, target, state)
        )

    def init_state(self, params: Any) -> OptimizerState:
        """Returns the state of every group before the first step.

        Args:
          params: pytree of parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.

        Returns:
          One `step`; the `param_states` of every group by its name (`GroupStates`).
        """
        selection = self._selections.of(params, creates=True)
        leaves = jax.tree.leaves(params)
        parts = zip(selection.trained, self.sub_optimizers, strict=True)
        states = [d.init_state(part.cut(leaves)).param_states for part, d in parts]
        is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        step = jax.eval_shape(_zero) if is_abstract else _zero()
        return OptimizerState(step, join_states(selection, states))

    def apply_gradient(
        self,
        hyper_params: Any,
        params: Any,
        state: OptimizerState,
        grads: Any,
        **extra_args: Any,
    ) -> tuple[Any, OptimizerState]:
        """Makes one update of every group.

        Args:
          hyper_params: one dataclass per group that is not frozen, in order.
          params: pytree of parameters.
          state: the state that belongs to them.
          grads: pytree like `params`; frozen leaves may be `None` or missing.
          **extra_args: passed to the definitions that use them.

        Raises:
          HyperParamError: `hyper_params` has the wrong length; or raised by a definition.
          TreeMismatchError: `grads` have other containers or keys than `params`.
        """
        return self._update("apply_gradient", hyper_params, params, state, grads, extra_args)

    def compute_updates(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any, **extra_args: Any
    ) -> tuple[Any, OptimizerState]:
        """Returns what `apply_gradient` adds to the parameters, and the new state.

        Args:
          hyper_params: see `apply_gradient`, as all of them.
          params: pytree of parameters.
          state: the state that belongs to them.
          grads: pytree like `params`; frozen leaves may be `None` or missing.
          **extra_args: passed to the definitions that use them.

        Returns:
          A tree like the parameters, zeros where they are frozen; the new state.
        """
        return self._update("compute_updates", hyper_params, params, state, grads, extra_args)

    def _update(
        self,
        method: Literal["apply_gradient", "compute_updates"],
        hyper_params: Any,
        params: Any,
        state: OptimizerState,
        grads: Any,
        extra_args: Mapping[str, Any],
    ) -> tuple[Any, OptimizerState]:
        hypers.check_length(hyper_params, self.group_names)
        return update_groups(
            self.select(params),
            Optimizer(self, state, params),
            grads,
            method=method,
            hyper_params=hyper_params,
            extra_args=extra_args,
        )

    def has_hyper_param(self, name: str) -> bool:
        """Returns whether some group has a hyper-parameter of that name."""
        return any(definition.has_hyper_param(name) for definition in self.sub_optimizers)

    def update_hyper_params(
        self, *, missing: Literal["error", "ignore"] = "error", **overrides: Any
    ) -> tuple[Any, ...]:
        """Returns the hyper-parameters of every group for one update.

        Args:
          missing: `'ignore'` to apply an override only to the groups that have it.
          **overrides: `hyper_params=` a sequence with one dataclass per group that is not frozen;
            `group_overrides=` a mapping from group names to overrides; any other name reaches every
            group, or with a mapping from names of groups as its value those groups.

        Raises:
          HyperParamError: a wrong length, an unknown group, or a name that a group does not have.
        """
        given = overrides.pop("hyper_params", None)
        by_group = hypers.by_group(overrides.pop("group_overrides", None), given, self.groups)
        if given is not None:
            hypers.check_length(given, self.group_names)
        shared = hypers.of_groups(overrides, self.group_names, self.sub_optimizers, missing=missing)
        found = []
        names = zip(self.group_names, self.sub_optimizers, shared, strict=True)
        for i, (name, definition, broadcast) in enumerate(names):
            own: dict[str, Any] = {} if given is None else {"hyper_params": given[i]}
            if missing != "error" and isinstance(definition, MultiOptimizer):
                own["missing"] = missing
            with hypers.named(name):
                found.append(
                    self._hyper_params_of(definition, own, broadcast, by_group.get(name, {}))
                )
        return tuple(found)

    def _hyper_params_of(
        self,
        definition: OptimizerDef,
        given: Mapping[str, Any],
        broadcast: Mapping[str, Any],
        overrides: Mapping[str, Any],
    ) -> Any:
        """Those of one group: given or its own, with overrides for all groups and for this one."""
        return definition.update_hyper_params(**given, **{**broadcast, **overrides})

    def resolve_hyper_params(
        self, hyper_params: Any, params: Any, state: OptimizerState, **extra_args: Any
    ) -> dict[str, Any]:
        """Returns the hyper-parameters that an update uses, by group.

        Schedules are resolved to numbers if a group's definition supports it
        (`opt_core.protocols.ResolvesHyperParams`).

        Args:
          hyper_params: one dataclass per group that is not frozen, in order.
          params: pytree of parameters.
          state: the state that belongs to them.
          **extra_args: passed to the definitions that use them.
        """
        hypers.check_length(hyper_params, self.group_names)
        return resolve_groups(
            self.select(params),
            list(self.split(Optimizer(self, state, params)).values()),
            jax.tree.leaves(params),
            hyper_params=hyper_params,
            extra_args=extra_args,
        )

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that some definition takes in its update and none overrides."""
        return extra_arg_names(self.sub_optimizers, names)

    def args_of_params(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that refer to the parameters for some definition."""
        return args_of_params(self.sub_optimizers, names)

    def takes_per_example_grads(self, params: Any, state: OptimizerState, grads: Any) -> bool:
        """Returns whether some definition takes its group's gradients per example.

        Args:
          params: pytree of parameters.
          state: the state that belongs to them.
          grads: pytree like `params`; frozen leaves may be `None` or missing.
        """
        return takes_per_example_grads(self.select(params), Optimizer(self, state, params), grads)

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns the optimizer with every leaf replaced by its logical axes.

        Args:
          optimizer: an optimizer of this definition; arrays or `jax.ShapeDtypeStruct` leaves.
          param_axes: a tree like the parameters with a `PartitionSpec`, or `None`, per leaf. Dicts
            and FrozenDicts are interchangeable.

        Returns:
          An `Optimizer`: the axes as its target, `None` as its step. For a definition that does not
          derive axes, a leaf of its state with the parameter's shape has the parameter's axes.

        Raises:
          TreeMismatchError: `param_axes` have other paths than the parameters; lists them.
        """
        selection = self.select(optimizer.target)
        target, param_states = derive_axes(
            selection, optimizer, list(self.split(optimizer).values()), param_axes
        )
        return Optimizer(self, OptimizerState(step=None, param_states=param_states), target)

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns what the state of every group means, as described by its definition.

        Leaves and transformations have their groups. Parameters have their paths in the whole tree,
        whatever a group's definition sees.

        Args:
          params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
          state: the state that belongs to them.
        """
        return describe_groups(self, params, state)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns `{'target': ..., 'state': {'step': ..., 'param_states': ...}}`.

        Every definition writes its own part. If every group keeps an entry per parameter,
        `param_states` has the parameters' paths, with `None` for frozen ones, as in Flax and T5X;
        otherwise it has an entry per group by name, omitting groups with nothing to write.

        Args:
          target: the parameters.
          state: the state that belongs to them.
        """
        states = write_states(target, self._group_optimizers(target, state))
        return target_dict(target, state.step, states)

    def _has_entries(self, structure: Any, target: Any, state: OptimizerState) -> bool:
        del structure
        return is_merged(self._group_optimizers(target, state))

    def _match(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        given = self._group_optimizers(target, state)
        state_dict, problems = read_list_layout(state_dict, given)
        if not is_whole(state_dict):
            return super()._match(target, state, state_dict)
        whole = Optimizer(self, state, target)
        restored, report = match_groups(whole, state_dict, given, self._match_rest)
        found = dataclasses.replace(report, mismatches=(*problems, *report.mismatches))
        return unalias(restored), found

    def _match_rest(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        """Restores the step and the frozen leaves; leaves of groups are `()` here."""
        return super()._match(target, state, state_dict)


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)
