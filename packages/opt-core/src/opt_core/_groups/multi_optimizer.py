"""Several definitions over one tree of parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from opt_core._aliasing import unalias
from opt_core._description.values import StateDescription
from opt_core._groups import overrides as hypers
from opt_core._groups.axes import derive_axes, with_axes
from opt_core._groups.description import describe_groups
from opt_core._groups.divisions import Divisions
from opt_core._groups.patterns import LogicalAxes, logical_axes_by_path
from opt_core._groups.selection import Selection, has_shape
from opt_core._groups.state_dict import (
    Share,
    is_merged,
    is_whole,
    match_groups,
    read_list_layout,
    shares,
    target_dict,
    write_states,
)
from opt_core._groups.states import join_states
from opt_core._groups.table import (
    FROZEN,
    Frozen,
    Group,
    check_groups,
    groups_of_pairs,
    groups_of_rules,
)
from opt_core._groups.updates import (
    args_of_params,
    extra_arg_names,
    takes_per_example_grads,
    update_groups,
)
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._paths import flatten_with_paths
from opt_core._report import RestoreReport


class MultiOptimizer(OptimizerDef):
    """Several definitions over disjoint groups of the parameters.

    Every definition sees a tree with the leaves of its group alone. Leaves of no group are frozen:
    they have no state, are returned as they are, and need no gradient.

    Args:
      *traversals_and_optimizers: pairs of a pattern and a definition, or one sequence of them. A
        pattern is a traversal with `iterate` and `update` (`flax.traverse_util`), or what
        `from_rules` takes.
      names: what the groups are called; by default `'0'`, `'1'`, ...
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

    groups: tuple[Group, ...]
    sub_optimizers: tuple[OptimizerDef, ...]
    traversals: tuple[Any, ...]
    param_axes: LogicalAxes | None
    _selections: Divisions
    _allow_unused_traversals: ClassVar[bool] = False

    def __init__(
        self,
        *traversals_and_optimizers: Any,
        names: Sequence[str] | None = None,
        rest: OptimizerDef | Frozen = FROZEN,
        **keyword: Any,
    ) -> None:
        # T5X's configurations bind the sequence by its name.
        by_name = keyword.pop("traversals_and_optimizers", None)
        if keyword or (by_name is not None and traversals_and_optimizers):
            raise TypeError(
                f"`{type(self).__name__}` takes `(pattern, definition)` pairs, `names` and `rest`"
            )
        given = traversals_and_optimizers if by_name is None else (by_name,)
        self._define(groups_of_pairs(given, names, rest), None)

    @classmethod
    def from_rules(
        cls,
        rules: Sequence[Any],
        *,
        rest: OptimizerDef | Frozen | None = None,
        param_axes: Any = None,
    ) -> Self:
        """Returns the definition for an ordered table of path patterns.

        Args:
          rules: rows `(pattern, definition)` or `(name, pattern, definition)`; `FROZEN` may stand
            for a definition. A pattern is a regular expression that matches the whole path
            (`decoder/layers_0/mlp/wi/kernel`), a function of `(path, leaf)` where `leaf` is a
            `jax.ShapeDtypeStruct`, or a set of logical axes, all of which a leaf must have.
          rest: the definition of the leaves that no pattern matches. Without it they are an error.
          param_axes: a tree like the parameters with a `PartitionSpec` per leaf, for sets of
            logical axes and for definitions that take them.

        Raises:
          GroupError: see the class; besides, a leaf is matched by no pattern and `rest` is not
            said.

        Examples:
          >>> sgd, adam = OptimizerDef('sgd'), OptimizerDef('adam')
          >>> rules = [('norms', '.*norm/.*', sgd), ('.*old_head.*', FROZEN)]
          >>> [group.name for group in MultiOptimizer.from_rules(rules, rest=adam).groups]
          ['norms', '1', 'rest']
        """
        self = cls.__new__(cls)
        self._define(groups_of_rules(rules, rest), None)
        return self if param_axes is None else self.with_param_axes(param_axes)

    def with_groups(self, groups: Sequence[Group]) -> Self:
        """Returns the definition with another table, see `groups`; logical axes stay known."""
        new = type(self).__new__(type(self))
        new._define(groups, self.param_axes)
        return new

    def _define(self, groups: Sequence[Group], param_axes: LogicalAxes | None) -> None:
        check_groups(groups)
        trained = [group for group in groups if not group.is_frozen]
        definitions = tuple(g.definition for g in trained if isinstance(g.definition, OptimizerDef))
        vars(self).pop("_fingerprint_cache", None)
        vars(self).update(
            groups=tuple(groups),
            sub_optimizers=definitions,
            traversals=tuple(group.pattern for group in trained),
            hyper_params=tuple(definition.hyper_params for definition in definitions),
            param_axes=param_axes,
            _selections=Divisions(groups, param_axes, self._allow_unused_traversals),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"`{name}`: a `{type(self).__name__}` does not change. Build another one, and take the "
            "state over with `regroup`; or override for one update: "
            "`apply_gradient(grads, hyper_params=...)`."
        )

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names of the groups that are not frozen, in order."""
        return tuple(group.name for group in self.groups if not group.is_frozen)

    def select(self, params: Any) -> Selection:
        """Returns how the groups divide a tree of parameters; decided once per structure.

        Args:
          params: arrays, tracers or `jax.ShapeDtypeStruct` leaves.

        Raises:
          GroupError: they do not divide it exactly; or a pattern that looks at shapes divides
            them otherwise than the parameters that an optimizer was created with.
        """
        return self._selections.of(params, creates=False)

    def _selection_like(self, tree: Any) -> Selection:
        """The selection of the parameters whose paths `tree` has; its leaves may be axes."""
        leaves = jax.tree.leaves(tree)
        if leaves and all(map(has_shape, leaves)):
            return self.select(tree)
        paths = {names for names, _ in flatten_with_paths(tree)}
        known = [s for s in self._selections.values() if s.owners.keys() <= paths]
        return known[-1] if known else self.select(tree)

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
        shared = self._shares(optimizer.target, optimizer.state)
        return {share.name: share.optimizer for share in shared}

    def _shares(self, target: Any, state: OptimizerState) -> list[Share]:
        return list(shares(self._selection_like(target), self.sub_optimizers, target, state))

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
          **extra_args: go to the definitions that use them.

        Raises:
          HyperParamError: `hyper_params` has another length; or a definition's own.
          TreeMismatchError: `grads` have other containers or keys than `params`.
        """
        hypers.check_length(hyper_params, self.group_names)
        return update_groups(
            self.select(params),
            Optimizer(self, state, params),
            grads,
            hyper_params=hyper_params,
            extra_args=extra_args,
        )

    def update_hyper_params(self, **overrides: Any) -> tuple[Any, ...]:
        """Returns the hyper-parameters of every group for one update.

        Args:
          **overrides: `hyper_params=` a sequence with one dataclass per group that is not frozen;
            `group_overrides=` a mapping from group names to overrides; any other name reaches every
            group.

        Raises:
          HyperParamError: a wrong length, an unknown group, or a name that a group does not have.
        """
        given = overrides.pop("hyper_params", None)
        by_group = hypers.by_group(overrides.pop("group_overrides", None), given, self.groups)
        if given is not None:
            hypers.check_length(given, self.group_names)
        hypers.check_reach(overrides, self.group_names)
        found = []
        names = zip(self.group_names, self.sub_optimizers, strict=True)
        for i, (name, definition) in enumerate(names):
            own = {} if given is None else {"hyper_params": given[i]}
            with hypers.named(name):
                found.append(
                    self._hyper_params_of(definition, own, overrides, by_group.get(name, {}))
                )
        return tuple(found)

    def _hyper_params_of(
        self,
        definition: OptimizerDef,
        given: Mapping[str, Any],
        broadcast: Mapping[str, Any],
        overrides: Mapping[str, Any],
    ) -> Any:
        """One group's: those given for it (or its own), with what all get, and what it alone."""
        return definition.update_hyper_params(**given, **{**broadcast, **overrides})

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that some definition takes in its update, and none overrides."""
        return extra_arg_names(self.sub_optimizers, names)

    def args_of_params(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that are about the parameters to some definition."""
        return args_of_params(self.sub_optimizers, names)

    def takes_per_example_grads(self, params: Any, state: OptimizerState, grads: Any) -> bool:
        """Returns whether some definition wants its group's gradients as they are, per example.

        Args:
          params: pytree of parameters.
          state: the state that belongs to them.
          grads: pytree like `params`; frozen leaves may be `None` or missing.
        """
        return takes_per_example_grads(self.select(params), Optimizer(self, state, params), grads)

    def with_param_axes(self, param_axes: Any) -> Self:
        """Returns a definition whose patterns and definitions know the logical axes.

        Args:
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf.
        """
        axes = logical_axes_by_path(param_axes)
        new = type(self).__new__(type(self))
        new._define(with_axes(self.groups, param_axes, axes), axes)
        return new

    def set_param_axes(self, param_axes: Any) -> None:
        """Tells this definition the logical axes, before `create`, as T5X's trainer does.

        Prefer `with_param_axes`: whatever was compiled with this definition does not know of it.
        The definitions of the groups stay as they are; this one goes on with copies.

        Args:
          param_axes: see `with_param_axes`. Where it is refused nothing changes.
        """
        new = self.with_param_axes(param_axes)
        self._define(new.groups, new.param_axes)

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns the optimizer with the logical axes of every leaf in its place.

        Args:
          optimizer: an optimizer of this definition; arrays or `jax.ShapeDtypeStruct` leaves.
          param_axes: a tree like the parameters with a `PartitionSpec`, or `None`, per leaf. Dicts
            and FrozenDicts may stand for one another.

        Returns:
          An `Optimizer`: the axes as its target, `None` as its step. A definition that derives no
          axes has the parameter's where a leaf of its state has the parameter's shape.

        Raises:
          TreeMismatchError: `param_axes` have other paths than the parameters; lists them.
        """
        selection = self.select(optimizer.target)
        target, param_states = derive_axes(
            selection, optimizer, list(self.split(optimizer).values()), param_axes
        )
        return Optimizer(self, OptimizerState(step=None, param_states=param_states), target)

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns what the state of every group means, as its definition says.

        Groups are in the leaves and in the transformations. Parameters have the paths that they
        have here, whatever a group's definition sees.

        Args:
          params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
          state: the state that belongs to them.
        """
        return describe_groups(self, params, state)

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns `{'target': ..., 'state': {'step': ..., 'param_states': ...}}`.

        Every definition writes its own part. Where every group keeps an entry per parameter,
        `param_states` has the parameters' paths, with `None` for frozen ones, as Flax and T5X wrote
        it; otherwise an entry per group by name, and none for a group without anything to write.

        Args:
          target: the parameters.
          state: the state that belongs to them.
        """
        states = write_states(target, self._shares(target, state))
        return target_dict(target, state.step, states)

    def _has_entries(self, structure: Any, target: Any, state: OptimizerState) -> bool:
        del structure
        return is_merged(self._shares(target, state))

    def _match(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        given = self._shares(target, state)
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
        """Restores the step and the frozen leaves; what belongs to a group is `()` here."""
        return super()._match(target, state, state_dict)

    def _identity(self) -> Any:
        return (self.groups, self.param_axes)

    def __deepcopy__(self, memo: Any) -> Self:
        return copy.copy(self)

    def __repr__(self) -> str:
        rows = ", ".join(f"{group}: {group.definition!r}" for group in self.groups)
        return f"{type(self).__name__}({rows})"


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)
