"""Several definitions over one tree of parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from opt_core import _group_layout as layout
from opt_core._aliasing import unalias
from opt_core._gradients import gradient_leaves
from opt_core._group_axes import axes_of_leaves, derive_group_axes, prune_axes
from opt_core._group_layout import GroupStates
from opt_core._groups import (
    FROZEN,
    REST,
    Frozen,
    Group,
    LogicalAxes,
    Names,
    check_pattern,
    logical_axes_by_path,
)
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState, increment_step
from opt_core._paths import flatten_with_paths
from opt_core._report import RestoreReport
from opt_core._selection import Part, Selection, at_paths, has_shape, replace_at, select
from opt_core._state_dict import restore_state_dict, to_state_dict
from opt_core.errors import GroupError, HyperParamError, UnusedArgumentError
from opt_core.protocols import TakesExtraArgs, TakesParamAxes

_KEPT_SELECTIONS = 8


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
      ...         return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(lambda _: (), params))
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

    def __init__(
        self,
        *traversals_and_optimizers: Any,
        names: Sequence[str] | None = None,
        rest: OptimizerDef | Frozen = FROZEN,
        **keyword: Any,
    ) -> None:
        # T5X's configurations bind the sequence by its name.
        given = keyword.pop("traversals_and_optimizers", None)
        if keyword or (given is not None and traversals_and_optimizers):
            raise TypeError(
                f"`{type(self).__name__}` takes `(pattern, definition)` pairs, `names` and `rest`"
            )
        pairs = _pairs(traversals_and_optimizers if given is None else (given,))
        names = [str(i) for i in range(len(pairs))] if names is None else list(names)
        if len(names) != len(pairs):
            raise GroupError(
                f"`names` has {len(names)} names for {len(pairs)} groups; give one each"
            )
        rows = [(name, *pair) for name, pair in zip(names, pairs, strict=True)]
        self._define([*(Group(*row) for row in rows), Group("rest", REST, rest)], None)

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
          >>> definition = MultiOptimizer.from_rules(
          ...     [('norms', '.*norm/.*', sgd), ('.*old_head.*', FROZEN)], rest=adam)
          >>> [group.name for group in definition.groups]
          ['norms', '1', 'rest']
        """
        groups = [Group(*_row(row, i)) for i, row in enumerate(rules)]
        if rest is not None:
            groups.append(Group("rest", REST, rest))
        return cls._from_groups(groups, param_axes)

    @classmethod
    def _from_groups(cls, groups: Sequence[Group], param_axes: Any = None) -> Self:
        self = cls.__new__(cls)
        self._define(groups, None)
        if param_axes is not None:
            self.set_param_axes(param_axes)
        return self

    def _define(self, groups: Sequence[Group], param_axes: LogicalAxes | None) -> None:
        _check(groups)
        trained = [group for group in groups if not group.is_frozen]
        definitions = tuple(g.definition for g in trained if isinstance(g.definition, OptimizerDef))
        vars(self).pop("_fingerprint_cache", None)
        vars(self).update(
            groups=tuple(groups),
            sub_optimizers=definitions,
            traversals=tuple(group.pattern for group in trained),
            hyper_params=tuple(definition.hyper_params for definition in definitions),
            param_axes=param_axes,
            _selections={},
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

    # Selection.

    def select(self, params: Any) -> Selection:
        """Returns how the groups divide a tree of parameters; decided once per structure.

        Args:
          params: arrays, tracers or `jax.ShapeDtypeStruct` leaves.

        Raises:
          GroupError: they do not divide it exactly.
        """
        leaves, treedef = jax.tree.flatten(params)
        key = (treedef, tuple((x.shape, x.dtype) if has_shape(x) else None for x in leaves))
        if (found := self._selections.get(key)) is None:
            found = select(self.groups, params, self.param_axes)
            while len(self._selections) >= _KEPT_SELECTIONS:
                self._selections.pop(next(iter(self._selections)))
            self._selections[key] = found
        return found

    def _selection_like(self, tree: Any) -> Selection:
        """The selection of parameters that `tree` has the paths of; its leaves may be axes."""
        leaves = jax.tree.leaves(tree)
        if leaves and all(map(has_shape, leaves)):
            return self.select(tree)
        paths = {names for names, _ in flatten_with_paths(tree)}
        known = [s for s in self._selections.values() if s.owners.keys() <= paths]
        return known[-1] if known else self.select(tree)

    # The contract.

    def init_state(self, params: Any) -> OptimizerState:
        """Returns the state of every group before the first step.

        Args:
          params: pytree of parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.

        Returns:
          One `step`. `param_states` mirrors the parameters where every group keeps an entry per
          parameter, with `None` for frozen ones; otherwise it is a mapping of group names.
        """
        selection = self.select(params)
        leaves = jax.tree.leaves(params)
        states = [
            definition.init_state(part.cut(leaves)).param_states
            for part, definition in self._trained(selection)
        ]
        step = jnp.zeros((), jnp.int32)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            step = jax.eval_shape(lambda: jnp.zeros((), jnp.int32))
        return OptimizerState(step, self._join(selection, states))

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
        self._check_length(hyper_params)
        selection = self.select(params)
        leaves, treedef = jax.tree.flatten(params)
        needed = {selection.paths[i] for part in selection.trained for i in part.members}
        gradients = gradient_leaves(params, grads, needed)
        states, used = [], set[str]()
        split = self._split(selection, state.param_states)
        for (part, definition), hyper, param_states in zip(
            self._trained(selection), hyper_params, split, strict=True
        ):
            with _named(part.group):
                taken = _extra_args_of(definition, extra_args)
                (new, new_state), rejected = _apply(
                    definition,
                    hyper,
                    part.cut(leaves),
                    OptimizerState(state.step, param_states),
                    part.cut(gradients),
                    taken,
                )
            used |= taken.keys() - rejected
            part.paste(new, leaves)
            states.append(new_state.param_states)
        if unused := extra_args.keys() - used:
            raise UnusedArgumentError(_unused_message(unused), unused)
        return treedef.unflatten(leaves), OptimizerState(
            increment_step(state.step), self._join(selection, states)
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
        by_group = overrides.pop("group_overrides", None) or {}
        if given is not None:
            self._check_length(given)
        self._check_names(by_group)
        found = []
        for i, (name, definition) in enumerate(
            zip(self.group_names, self.sub_optimizers, strict=True)
        ):
            own = {} if given is None else {"hyper_params": given[i]}
            with _named(f"`{name}`"):
                found.append(
                    self._group_hyper_params(definition, own, overrides, by_group.get(name, {}))
                )
        return tuple(found)

    def _group_hyper_params(
        self,
        definition: OptimizerDef,
        given: Mapping[str, Any],
        broadcast: Mapping[str, Any],
        overrides: Mapping[str, Any],
    ) -> Any:
        """One group's: those given for it alone (or its own), what all get, what it gets alone."""
        return definition.update_hyper_params(**given, **{**broadcast, **overrides})

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that some definition takes in its update, and none overrides."""
        names = frozenset(names) - {"hyper_params", "group_overrides"}
        claimed = [
            (d, d.extra_arg_names(names)) for d in self.sub_optimizers if _takes_extra_args(d)
        ]
        found = frozenset[str]().union(*(taken for _, taken in claimed))
        return frozenset(n for n in found if not any(_overrides(d, n) for d in self.sub_optimizers))

    def split(self, optimizer: Optimizer) -> dict[str, Optimizer]:
        """Returns an optimizer per group that is not frozen, as its definition sees it.

        Args:
          optimizer: one of this definition.

        Examples:
          >>> definition = MultiOptimizer(('w', OptimizerDef(None)), names=['weights'])
          >>> params = {'w': jnp.ones(2), 'b': jnp.ones(1)}
          >>> state = OptimizerState(jnp.int32(3), {'w': jnp.zeros(2), 'b': None})
          >>> definition.split(Optimizer(definition, state, params))['weights'].target.keys()
          dict_keys(['w'])
        """
        return {
            part.group.name: Optimizer(definition, state, target)
            for part, definition, state, target in self._cut(optimizer.target, optimizer.state)
        }

    def _trained(self, selection: Selection) -> Iterator[tuple[Part, OptimizerDef]]:
        return zip(selection.trained, self.sub_optimizers, strict=True)

    def _cut(
        self, target: Any, state: OptimizerState
    ) -> Iterator[tuple[Part, OptimizerDef, OptimizerState, Any]]:
        """Every group with its state and parameters; leaves may be anything, axes too."""
        selection = self._selection_like(target)
        states = state.param_states
        for part, definition in self._trained(selection):
            position = selection.parts.index(part)
            holes = definition.whole_tree
            own = (
                states[part.group.name]
                if isinstance(states, GroupStates)
                else selection.cut_by_path(states, position)
            )
            cut = selection.cut_by_path(target, position, holes=holes)
            yield part, definition, OptimizerState(state.step, own), cut

    def _split(self, selection: Selection, param_states: Any) -> list[Any]:
        if isinstance(param_states, GroupStates):
            return [param_states[part.group.name] for part in selection.trained]
        states = selection.treedef.flatten_up_to(param_states)
        return [part.cut(states) for part in selection.trained]

    def _join(self, selection: Selection, states: Sequence[Any]) -> Any:
        parts = list(self._trained(selection))
        if not all(_is_per_parameter(d, p, s) for (p, d), s in zip(parts, states, strict=True)):
            names = [part.group.name for part, _ in parts]
            return GroupStates(dict(zip(names, states, strict=True)))
        leaves: list[Any] = [None] * len(selection.paths)
        for (part, _), state in zip(parts, states, strict=True):
            part.paste(state, leaves)
        return selection.treedef.unflatten(leaves)

    # Logical axes.

    def set_param_axes(self, param_axes: Any) -> None:
        """Tells the patterns and the definitions the logical axes, before `create`.

        The definitions themselves stay as they are: this one goes on with copies.

        Args:
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf.
        """
        axes = logical_axes_by_path(param_axes)
        self._define(self.groups, axes)
        if not any(isinstance(definition, TakesParamAxes) for definition in self.sub_optimizers):
            return
        selection = self._selection_like(param_axes)
        groups = []
        for position, group in enumerate(self.groups):
            definition = group.definition
            if isinstance(definition, TakesParamAxes):
                definition = copy.copy(definition)
                definition.set_param_axes(prune_axes(selection, param_axes, position))
            groups.append(Group(group.name, group.pattern, definition))
        self._define(groups, axes)

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
        axes = axes_of_leaves(selection, optimizer.target, param_axes)
        subs = self.split(optimizer)
        states = [
            derive_group_axes(subs[part.group.name], part.cut(axes)).param_states
            for part, _ in self._trained(selection)
        ]
        joined = self._join_like(selection, optimizer.state.param_states, states)
        state = OptimizerState(step=None, param_states=joined)
        return Optimizer(self, state, selection.treedef.unflatten(axes))

    def _join_like(self, selection: Selection, like: Any, states: Sequence[Any]) -> Any:
        if isinstance(like, GroupStates):
            return GroupStates(dict(zip(like, states, strict=True)))
        leaves: list[Any] = [None] * len(selection.paths)
        for part, state in zip(selection.trained, states, strict=True):
            part.paste(state, leaves)
        return selection.treedef.unflatten(leaves)

    # State dicts.

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns `{'target': ..., 'state': {'step': ..., 'param_states': ...}}`.

        Every definition writes its own part. `param_states` has the parameters' paths, with `None`
        for frozen ones, or an entry per group by name; see `init_state`. A group without anything
        to write has no entry.

        Args:
          target: the parameters.
          state: the state that belongs to them.
        """
        written: dict[str, Any] = {}
        is_grouped = isinstance(state.param_states, GroupStates)
        if not is_grouped:
            written = layout.blank(target)
        for part, definition, own, cut in self._cut(target, state):
            entry = definition.state_dict(cut, own)["state"].get("param_states", {})
            if not is_grouped:
                for names in self._paths_of(part, target):
                    value = layout.get_at(entry, names, {})
                    if not names:
                        written = value
                    else:
                        layout.set_at(written, names, value)
            elif not isinstance(entry, Mapping) or entry:
                written[part.group.name] = entry
        rest = {"param_states": written} if written or not is_grouped else {}
        return {
            "target": to_state_dict(target),
            "state": {"step": to_state_dict(state.step), **rest},
        }

    def _paths_of(self, part: Part, target: Any) -> list[Names]:
        return [self._selection_like(target).paths[i] for i in part.members]

    def _match(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        given = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        is_grouped = isinstance(state.param_states, GroupStates)
        selection = self._selection_like(target)
        members = [[selection.paths[i] for i in part.members] for part in selection.trained]
        problems: tuple[Any, ...] = ()
        if not is_grouped and layout.is_list_layout(given):
            given, problems = layout.from_list_layout(given, members)
            state_dict = {**state_dict, "state": given}
        if not isinstance(given, Mapping) or "target" not in state_dict:
            return super()._match(target, state, state_dict)

        owned = {names: () for paths in members for names in paths}
        shape = layout.trie(owned)
        (rest, rest_state), report = self._match_rest(
            replace_at(target, owned),
            OptimizerState(state.step, self._unowned_states(selection, state, owned)),
            {
                "target": layout.leftover(state_dict["target"], shape),
                "state": {
                    **given,
                    "param_states": layout.leftover(
                        given.get("param_states", {}),
                        dict.fromkeys(state.param_states) if is_grouped else shape,
                    ),
                },
            },
        )
        reports = [RestoreReport((*problems, *report.mismatches), report.matched)]
        states: dict[str, Any] = {}
        leaves, entries = {}, {}
        for part, definition, own, cut in self._cut(target, state):
            paths = self._paths_of(part, target)
            own_shape = layout.trie(paths)
            written = {"target": layout.restrict(state_dict["target"], own_shape)}
            written["state"] = {"step": own.step}
            if "param_states" in given:
                entry = given["param_states"]
                if not is_grouped:
                    written["state"]["param_states"] = layout.restrict(entry, own_shape)
                elif isinstance(entry, Mapping) and part.group.name in entry:
                    written["state"]["param_states"] = entry[part.group.name]
            (cut, own), found = layout.restore_group(definition, cut, own, written)
            reports.append(layout.without_step(found))
            wanted = dict.fromkeys(paths)
            leaves |= dict(at_paths(cut, wanted))
            if is_grouped:
                reports[-1] = layout.renamed(reports[-1], part.group.name)
                states[part.group.name] = own.param_states
            else:
                entries |= dict(at_paths(own.param_states, wanted))
        restored = (
            GroupStates(states) if is_grouped else replace_at(rest_state.param_states, entries)
        )
        new = replace_at(rest, leaves), OptimizerState(rest_state.step, restored)
        return unalias(new), layout.merged_reports(reports)

    def _unowned_states(
        self, selection: Selection, state: OptimizerState, owned: Mapping[Names, Any]
    ) -> Any:
        if isinstance(state.param_states, GroupStates):
            return {}
        return replace_at(state.param_states, {n: owned.get(n) for n in selection.owners})

    def _match_rest(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        """Restores the step and the frozen leaves; where the groups have something, `()` is."""
        return super()._match(target, state, state_dict)

    # What every definition is.

    def _check_length(self, hyper_params: Any) -> None:
        expected = len(self.sub_optimizers)
        if not isinstance(hyper_params, Sequence) or len(hyper_params) != expected:
            found = len(hyper_params) if isinstance(hyper_params, Sequence) else "no sequence"
            raise HyperParamError(
                f"`hyper_params` must have {expected} entries, one for each of "
                f"{', '.join(f'`{name}`' for name in self.group_names)}; got {found}"
            )

    def _check_names(self, by_group: Mapping[str, Any]) -> None:
        names = self.group_names
        for name in by_group:
            if name not in names:
                frozen = any(group.name == name for group in self.groups)
                what = "is frozen" if frozen else "is no group"
                raise HyperParamError(
                    f"`group_overrides`: `{name}` {what}; the groups that are updated are "
                    f"{', '.join(f'`{n}`' for n in names)}"
                )

    def _identity(self) -> Any:
        return (self.groups, self.param_axes)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_selections": {}}

    def __copy__(self) -> Self:
        new = type(self).__new__(type(self))
        vars(new).update(self.__getstate__())
        return new

    def __deepcopy__(self, memo: Any) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        rows = ", ".join(f"{group}: {group.definition!r}" for group in self.groups)
        return f"{type(self).__name__}({rows})"


def _pairs(given: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The pairs, given as they are or as one sequence."""
    if len(given) == 1 and not _is_pair(given[0]):
        given = list(given[0]) if isinstance(given[0], Iterable) else given
    for pair in given:
        if not _is_pair(pair):
            raise TypeError(
                "a group is a pair `(pattern, definition)`; got "
                + (f"a {type(pair).__name__}" if not _has_two(pair) else _no_definition(pair[1]))
            )
    if not given:
        raise GroupError("there is no group: pass `(pattern, definition)` pairs")
    return [(pattern, definition) for pattern, definition in given]


def _has_two(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2


def _is_pair(pair: Any) -> bool:
    return _has_two(pair) and isinstance(pair[1], OptimizerDef | Frozen)


def _no_definition(value: Any) -> str:
    hint = " (wrap it: `opt_optax_bridge.OptaxWrapper(tx)`)" if hasattr(value, "update") else ""
    return f"a {type(value).__name__} for a definition{hint}"


def _row(row: Any, position: int) -> tuple[str, Any, Any]:
    if not isinstance(row, tuple | list) or len(row) not in (2, 3):
        raise TypeError(
            f"rule {position} must be `(pattern, definition)` or `(name, pattern, definition)`"
        )
    name, pattern, definition = row if len(row) == 3 else (str(position), *row)
    return name, pattern, definition


def _check(groups: Sequence[Group]) -> None:
    names = [group.name for group in groups]
    for group in groups:
        if not isinstance(group.name, str) or not group.name or "/" in group.name:
            raise GroupError(f"a group's name is text without `/`; got {group.name!r}")
        if names.count(group.name) > 1:
            raise GroupError(f"two groups are called `{group.name}`; rename one")
        if not isinstance(group.definition, OptimizerDef | Frozen):
            raise TypeError(f"{group} has {_no_definition(group.definition)}")
        check_pattern(group.pattern)


def _is_per_parameter(definition: OptimizerDef, part: Part, state: Any) -> bool:
    if definition.whole_tree or isinstance(state, GroupStates):
        return False
    try:
        part.treedef.flatten_up_to(state)
    except (ValueError, TypeError, KeyError):
        return False
    return True


def _takes_extra_args(definition: OptimizerDef) -> bool:
    return isinstance(definition, TakesExtraArgs)


def _overrides(definition: OptimizerDef, name: str) -> bool:
    """Whether it is the name of a hyper-parameter."""
    if isinstance(definition, MultiOptimizer):
        return any(_overrides(sub, name) for sub in definition.sub_optimizers)
    return name in getattr(definition.hyper_params, "__dataclass_fields__", ())


def _extra_args_of(definition: OptimizerDef, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    if not extra_args or not isinstance(definition, TakesExtraArgs):
        return {}
    return {name: extra_args[name] for name in definition.extra_arg_names(extra_args)}


def _apply(
    definition: Any, hyper_params: Any, params: Any, state: Any, grads: Any, extra_args: Any
) -> tuple[tuple[Any, OptimizerState], frozenset[str]]:
    """One group's update, and the extra arguments that it has no use for."""
    rejected = frozenset[str]()
    while True:
        taken = {name: value for name, value in extra_args.items() if name not in rejected}
        try:
            return definition.apply_gradient(hyper_params, params, state, grads, **taken), rejected
        except UnusedArgumentError as error:
            if not error.names & taken.keys():
                raise
            rejected |= error.names


@contextlib.contextmanager
def _named(group: Any) -> Iterator[None]:
    """Says in an error about hyper-parameters which group it is about."""
    try:
        yield
    except UnusedArgumentError:
        raise
    except HyperParamError as error:
        raise HyperParamError(f"group {group}: {error}") from error


def _unused_message(names: Iterable[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in sorted(names))
    return f"{listed}: neither a hyper-parameter nor an extra argument that any group uses"
