"""Several definitions over one tree of parameters."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

from opt_core._description import (
    LeafDescription,
    StateDescription,
    TransformationDescription,
    axes_of_leaves,
    describe_state,
)
from opt_core._gradients import gradient_leaves
from opt_core._groups.table import (
    FROZEN,
    Division,
    Group,
    GroupStates,
    LogicalAxes,
    Pair,
    Rest,
    Rule,
    check_groups,
    divide,
    from_layout,
    groups_of_pairs,
    groups_of_rules,
    logical_axes_by_path,
    to_layout,
    with_axes,
    written_states,
)
from opt_core._optimizer import (
    Optimizer,
    OptimizerDef,
    OptimizerState,
    check_missing,
    hyper_param_names,
    increment_step,
)
from opt_core._state_dict import to_state_dict
from opt_core._trees import Names, listed, named_leaves
from opt_core.errors import GroupError, HyperParamError


class MultiOptimizer(OptimizerDef):
    """Several definitions over disjoint groups of the parameters.

    Every definition sees the containers of the parameters, with `()` where a leaf belongs to
    another group. Leaves without a group are frozen: they have no state, are returned unchanged,
    and need no gradient. Which leaf belongs to which group is decided in `create`, and carried by
    the state (`GroupStates.division`).

    Args:
      *pairs: pairs of a pattern and a definition, or one sequence of them. A pattern is a traversal
        with `iterate` and `update` (`flax.traverse_util`), or what `from_rules` takes.
      names: of the groups; by default `'0'`, `'1'`, ...
      rest: the definition of the leaves that no pattern matches; `FROZEN` by default, as in Flax.

    Attributes:
      groups: the table, frozen groups included.
      group_names: the names of the groups that are not frozen, in order.
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
    group_names: tuple[str, ...]
    sub_optimizers: tuple[OptimizerDef, ...]
    traversals: tuple[Any, ...]
    param_axes: LogicalAxes | None

    def __init__(
        self,
        *pairs: Pair | Iterable[Pair],
        names: Sequence[str] | None = None,
        rest: OptimizerDef = FROZEN,
    ) -> None:
        self._define(groups_of_pairs(pairs, names, rest), None)

    @classmethod
    def from_rules(
        cls, rules: Iterable[Rule], *, rest: OptimizerDef | None = None, param_axes: Any = None
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
          GroupError: see the class; or no pattern matches a leaf, and `rest` is not given.

        Examples:
          >>> from opt_core import MultiOptimizer
          >>> sgd, adam = OptimizerDef('sgd'), OptimizerDef('adam')
          >>> rules = [('norms', '.*norm/.*', sgd), ('.*old_head.*', FROZEN)]
          >>> [group.name for group in MultiOptimizer.from_rules(rules, rest=adam).groups]
          ['norms', '1', 'rest']
        """
        self = cls.__new__(cls)
        self._define(groups_of_rules(rules, rest), None)
        return self if param_axes is None else self.with_param_axes(param_axes)

    def with_groups(self, groups: Sequence[Group]) -> Self:
        """Returns the definition with another table, see `groups`; known logical axes are kept."""
        new = type(self).__new__(type(self))
        new._define(groups, self.param_axes)
        return new

    def _define(self, groups: Sequence[Group], param_axes: LogicalAxes | None) -> None:
        check_groups(groups)
        trained = [group for group in groups if not group.is_frozen]
        definitions = tuple(group.definition for group in trained)
        vars(self).pop("_fingerprint_cache", None)
        vars(self).update(
            groups=tuple(groups),
            group_names=tuple(group.name for group in trained),
            sub_optimizers=definitions,
            traversals=tuple(group.pattern for group in trained),
            hyper_params=tuple(definition.hyper_params for definition in definitions),
            param_axes=param_axes,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"`{name}`: a `{type(self).__name__}` cannot change. Build another one, and carry the "
            "state over with `regroup`; or override for one update: "
            "`apply_gradient(grads, hyper_params=...)`."
        )

    def _identity(self) -> Any:
        return (self.groups, self.param_axes)

    def __deepcopy__(self, memo: Any) -> Self:
        return copy.copy(self)

    def __repr__(self) -> str:
        rows = ", ".join(f"{group}: {group.definition!r}" for group in self.groups)
        return f"{type(self).__name__}({rows})"

    # Who belongs where.

    def select(self, params: Any) -> Division:
        """Returns how the patterns divide a tree of parameters, as `create` does.

        An optimizer that exists has its own division in its state, which counts.

        Raises:
          GroupError: the groups do not partition the tree.
        """
        return divide(self.groups, params, self.param_axes, may_be_empty=self.may_be_empty)

    def may_be_empty(self, group: Group) -> bool:
        """Returns whether a group may have no leaf: the rest alone; of others that is an error."""
        return isinstance(group.pattern, Rest)

    def division(self, state: OptimizerState) -> Division:
        """Returns how the parameters of an optimizer are divided, as decided in its `create`.

        Raises:
          GroupError: the state was made for other groups.
        """
        states = state.param_states
        names = [group.name for group in self.groups]
        is_grouped = isinstance(states, GroupStates)
        if not is_grouped or set(states) != set(self.group_names):
            kind = f"groups {list(states)}" if is_grouped else f"a {type(states).__name__}"
            raise GroupError(
                f"`param_states`: expected `GroupStates` of the groups {list(self.group_names)}, "
                f"found {kind}. Create the optimizer with this definition, carry its state over "
                "with `regroup`, or read a state dict with `restore_state`."
            )
        division: Division = states.division
        if set(division.names) != set(names):
            raise GroupError(
                f"`param_states`: expected the groups {names}, found {list(division.names)}, of "
                "which some are frozen. Carry the state over with `regroup`."
            )
        return division

    def split(self, optimizer: Optimizer) -> dict[str, Optimizer]:
        """Returns an optimizer per group that is not frozen, as its definition sees it.

        Examples:
          >>> class Sgd(OptimizerDef):
          ...     def init_state(self, params):
          ...         return OptimizerState(jnp.zeros((), jnp.int32), ())
          >>> definition = MultiOptimizer(('w', Sgd(None)), names=['weights'])
          >>> optimizer = definition.create({'w': 1.0, 'b': 2.0})
          >>> definition.split(optimizer)['weights'].target
          {'b': (), 'w': 1.0}
        """
        division, state = self.division(optimizer.state), optimizer.state
        return {
            name: Optimizer(
                definition,
                OptimizerState(state.step, state.param_states[name]),
                division.cut(name, optimizer.target),
            )
            for name, definition in zip(self.group_names, self.sub_optimizers, strict=True)
        }

    def leaf_groups(self, optimizer: Optimizer) -> Iterator[tuple[Names, Optimizer]]:
        """Yields the optimizers of all groups, those of nested groups in place of these."""
        for name, part in self.split(optimizer).items():
            for names, leaf in part.optimizer_def.leaf_groups(part):
                yield (name, *names), leaf

    # Updates.

    def init_state(self, params: Any) -> OptimizerState:
        """Returns one `step` and the `param_states` of every group by its name (`GroupStates`)."""
        division = self.select(params)
        states = {
            name: definition.init_state(division.cut(name, params)).param_states
            for name, definition in zip(self.group_names, self.sub_optimizers, strict=True)
        }
        is_abstract = any(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)
        )
        step = jax.eval_shape(_zero) if is_abstract else _zero()
        return OptimizerState(step, GroupStates(states, division))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any, **extra_args: Any
    ) -> tuple[Any, OptimizerState]:
        """Makes one update of every group.

        Args:
          hyper_params: one dataclass per group that is not frozen, in order.
          params: pytree of parameters.
          state: the state that belongs to them.
          grads: pytree like `params`; frozen leaves may be `None` or missing.
          **extra_args: passed to the definitions that use them.

        Raises:
          GroupError: an extra argument is about all parameters, such as the function of a line
            search, and a group that takes it has some of them.
          HyperParamError: `hyper_params` has the wrong length; or raised by a definition.
          TreeMismatchError: `grads` have other containers, keys or shapes than `params`.
        """
        return self._update("apply_gradient", hyper_params, params, state, grads, extra_args)

    def compute_updates(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any, **extra_args: Any
    ) -> tuple[Any, OptimizerState]:
        """Returns what `apply_gradient` adds to the parameters, and the new state.

        Takes the arguments of `apply_gradient`. The updates of frozen parameters are zeros.
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
        calls = self._calls(hyper_params, params, state, extra_args)
        division = self.division(state)
        gradients = division.treedef.unflatten(
            gradient_leaves(params, grads, optional=frozenset(division.frozen))
        )
        results = division.leaves(params)
        if method == "compute_updates":
            for i in division.frozen:
                results[i] = jnp.zeros_like(results[i])
        states: dict[str, Any] = {}
        for name, part, hyper, taken in calls:
            operands = hyper, part.target, part.state, division.cut(name, gradients)
            with naming(name):
                new, new_state = getattr(part.optimizer_def, method)(*operands, **taken)
            division.paste(name, new, results)
            states[name] = new_state.param_states
        new_state = OptimizerState(increment_step(state.step), GroupStates(states, division))
        return division.treedef.unflatten(results), new_state

    def _calls(
        self, hyper_params: Any, params: Any, state: OptimizerState, extra_args: Mapping[str, Any]
    ) -> list[tuple[str, Optimizer, Any, dict[str, Any]]]:
        """For every group its optimizer, its hyper-parameters and the extra arguments it takes."""
        check_length(hyper_params, self.group_names)
        division, parts = self.division(state), self.split(Optimizer(self, state, params))
        calls = [
            (name, part, hyper, taken_args(part.optimizer_def, extra_args, division, name))
            for (name, part), hyper in zip(parts.items(), hyper_params, strict=True)
        ]
        used = {name for *_, taken in calls for name in taken}
        if unused := sorted(extra_args.keys() - used):
            raise HyperParamError(
                f"{listed(unused)}: neither a hyper-parameter nor an extra argument of any group"
            )
        return calls

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that some definition takes in its update and none overrides."""
        asked = frozenset(names) - RESERVED
        taken = frozenset[str]().union(*(d.extra_arg_names(asked) for d in self.sub_optimizers))
        return frozenset(name for name in taken if not self.has_hyper_param(name))

    # Hyper-parameters.

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
            `group_overrides=` a mapping from names of groups to overrides,
            `{'group': {'learning_rate': 0.1}}`; any other name reaches every group.

        Raises:
          HyperParamError: a wrong length, an unknown group, or a name that a group does not have.
        """
        check_missing(missing)
        hyper_params = overrides.pop("hyper_params", None)
        by_group = overrides.pop("group_overrides", None) or {}
        if hyper_params is not None:
            check_length(hyper_params, self.group_names)
        if by_group:
            check_group_overrides(by_group, hyper_params, self.groups)
        self._check_reach(overrides, missing)
        updated = []
        for i, (name, definition) in enumerate(
            zip(self.group_names, self.sub_optimizers, strict=True)
        ):
            overall: dict[str, Any] = {
                key: value
                for key, value in overrides.items()
                if missing == "error" or definition.has_hyper_param(key)
            }
            if isinstance(definition, MultiOptimizer):
                overall["missing"] = missing
            own = {} if hyper_params is None else {"hyper_params": hyper_params[i]}
            with naming(name):
                updated.append(
                    definition.update_group_hyper_params(
                        overall, own | dict(by_group.get(name, {}))
                    )
                )
        return tuple(updated)

    def _check_reach(self, overrides: Iterable[str], missing: str) -> None:
        """Raises a `HyperParamError` for overrides that no group has."""
        if not self.sub_optimizers and (names := listed(overrides)) != "none":
            raise HyperParamError(f"{names}: there is no group to override: all of them are frozen")
        if missing == "error":
            return  # the first group that lacks one says so
        for name in overrides:
            if not self.has_hyper_param(name):
                known = listed(dict.fromkeys(known_names(self.hyper_params)))
                raise HyperParamError(
                    f"no group has a hyper-parameter `{name}`; the groups have {known}"
                )

    def resolve_hyper_params(
        self, hyper_params: Any, params: Any, state: OptimizerState, **extra_args: Any
    ) -> dict[str, Any]:
        """Returns the hyper-parameters that an update uses, by group, schedules as numbers.

        See `OptimizerDef.resolve_hyper_params`, with arguments as for `apply_gradient`.
        """
        resolved: dict[str, Any] = {}
        for name, part, hyper, taken in self._calls(hyper_params, params, state, extra_args):
            with naming(name):
                resolved[name] = part.optimizer_def.resolve_hyper_params(
                    hyper, part.target, part.state, **taken
                )
        return resolved

    # Axes and meaning.

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
        """Sets the logical axes, before `create`, as T5X's trainer does.

        Prefer `with_param_axes`: functions compiled with this definition do not see the change.
        The definitions of the groups are not changed; this one replaces them by copies.

        Args:
          param_axes: see `with_param_axes`. If it is rejected, nothing changes.
        """
        new = self.with_param_axes(param_axes)
        self._define(new.groups, new.param_axes)

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns the optimizer with every leaf replaced by its logical axes.

        See `OptimizerDef.derive_logical_axes`. Dicts and FrozenDicts are interchangeable in
        `param_axes`.
        """
        division = self.division(optimizer.state)
        axes = division.treedef.unflatten(axes_of_leaves(division.paths, param_axes))
        states = {
            name: part.optimizer_def.derive_logical_axes(
                part, division.cut(name, axes)
            ).state.param_states
            for name, part in self.split(optimizer).items()
        }
        return Optimizer(self, OptimizerState(None, GroupStates(states, division)), axes)

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns what the state of every group means; see `OptimizerDef.describe_state`."""
        paths = (path for path, _ in named_leaves(state.param_states))
        leaves: list[LeafDescription] = []
        transformations: list[TransformationDescription] = []
        for name, part in self.split(Optimizer(self, state, params)).items():
            inner = describe_state(part)
            leaves += [
                dataclasses.replace(leaf, group=(name, *leaf.group), path=path)
                for leaf, path in zip(inner.leaves, paths, strict=False)
            ]
            transformations += [
                dataclasses.replace(x, group=(name, *x.group)) for x in inner.transformations
            ]
        return StateDescription(tuple(leaves), tuple(transformations))

    # State dicts.

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns `{'target': ..., 'state': {'step': ..., 'param_states': ...}}`.

        If every group keeps an entry per parameter, `param_states` has the parameters' paths, with
        `None` for frozen ones, as in Flax and T5X; otherwise it has an entry per group by name,
        which its definition writes, omitting groups with nothing to write.
        """
        written = {"step": to_state_dict(state.step)} | written_states(
            Optimizer(self, state, target)
        )
        return {"target": to_state_dict(target), "state": written}

    def restore_state(
        self, opt_target: Any, opt_state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Returns parameters and state with the leaves of a state dict."""
        optimizer = Optimizer(self, opt_state, opt_target)
        like = OptimizerState(opt_state.step, to_layout(optimizer))
        target, restored = super().restore_state(opt_target, like, state_dict)
        states = from_layout(optimizer, restored.param_states)
        return target, OptimizerState(restored.step, states)


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


# What an update of groups is given, with errors that name them.


RESERVED = frozenset({"hyper_params", "group_overrides", "missing"})


def check_length(hyper_params: Any, names: Sequence[str]) -> None:
    """Raises a `HyperParamError` unless there is one entry per group."""
    is_sequence = isinstance(hyper_params, Sequence) and not isinstance(hyper_params, str)
    if not is_sequence or len(hyper_params) != len(names):
        got = str(len(hyper_params)) if is_sequence else f"a {type(hyper_params).__name__}"
        raise HyperParamError(
            f"`hyper_params` must have {len(names)} entries, one for each of {listed(names)}; got "
            f"{got}"
        )


def check_group_overrides(overrides: Any, hyper_params: Any, groups: Sequence[Group]) -> None:
    """Raises a `HyperParamError` for `group_overrides` of another form, or of unknown groups."""
    if not isinstance(overrides, Mapping):
        raise HyperParamError(
            "`group_overrides` must map names of groups to overrides, as "
            "`{'embeddings': {'learning_rate': 0.1}}`; got a " + type(overrides).__name__
        )
    frozen = {group.name for group in groups if group.is_frozen}
    names = [group.name for group in groups if not group.is_frozen]
    for name, values in overrides.items():
        if name not in names:
            what = "is frozen" if name in frozen else "is not a group"
            raise HyperParamError(
                f"`group_overrides`: `{name}` {what}; the groups that are updated are "
                f"{listed(names)}"
            )
        if not isinstance(values, Mapping):
            raise HyperParamError(
                f"`group_overrides`: `{name}` must map names of hyper-parameters to values; got a "
                f"{type(values).__name__}"
            )
        if hyper_params is not None and "hyper_params" in values:
            raise HyperParamError(
                f"group `{name}` is given `hyper_params` twice: in `hyper_params=` and in "
                "`group_overrides=`; leave one out"
            )


def known_names(hyper_params: Any) -> list[str]:
    """Returns the names of hyper-parameters, including those of nested groups."""
    if isinstance(hyper_params, tuple):
        return [name for inner in hyper_params for name in known_names(inner)]
    return list(hyper_param_names(hyper_params))


@contextlib.contextmanager
def naming(group: str) -> Iterator[None]:
    """Adds the name of the group to errors about hyper-parameters."""
    try:
        yield
    except HyperParamError as error:
        raise HyperParamError(f"group `{group}`: {error}") from error


def taken_args(
    definition: OptimizerDef, extra_args: Mapping[str, Any], division: Division, group: str
) -> dict[str, Any]:
    """Returns the extra arguments that the definition of a group takes."""
    taken = {name: extra_args[name] for name in definition.extra_arg_names(extra_args)}
    if len(division.members[group]) == len(division.owners):
        return taken
    for name, value in taken.items():
        if callable(value) or jax.tree.structure(value) == division.treedef:
            raise GroupError(
                f"group `{group}`: `{name}` is about all parameters, and this group has some of "
                "them. A line search works on all parameters of a definition: make one definition, "
                "with `optax.partition` for the directions and the search after it."
            )
    return taken
