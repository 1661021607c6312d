"""A definition with a table of groups: how the table is written, and what it selects."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax

from opt_core._groups.axes import with_axes
from opt_core._groups.patterns import LogicalAxes, logical_axes_by_path
from opt_core._groups.selection import Selection, has_shape
from opt_core._groups.selection_cache import SelectionCache
from opt_core._groups.table import (
    FROZEN,
    Frozen,
    Group,
    check_groups,
    groups_of_pairs,
    groups_of_rules,
)
from opt_core._optimizer import OptimizerDef
from opt_core._paths import flatten_with_paths


class Grouped(OptimizerDef):
    """A definition that partitions the parameters by a table of groups; see `MultiOptimizer`."""

    groups: tuple[Group, ...]
    sub_optimizers: tuple[OptimizerDef, ...]
    traversals: tuple[Any, ...]
    param_axes: LogicalAxes | None
    _selections: SelectionCache
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
        definitions = tuple(g.definition for g in trained if isinstance(g.definition, OptimizerDef))
        vars(self).pop("_fingerprint_cache", None)
        vars(self).update(
            groups=tuple(groups),
            sub_optimizers=definitions,
            traversals=tuple(group.pattern for group in trained),
            hyper_params=tuple(definition.hyper_params for definition in definitions),
            param_axes=param_axes,
            _selections=SelectionCache(groups, param_axes, self._allow_unused_traversals),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"`{name}`: a `{type(self).__name__}` cannot change. Build another one, and carry the "
            "state over with `regroup`; or override for one update: "
            "`apply_gradient(grads, hyper_params=...)`."
        )

    @property
    def group_names(self) -> tuple[str, ...]:
        """The names of the groups that are not frozen, in order."""
        return tuple(group.name for group in self.groups if not group.is_frozen)

    def select(self, params: Any) -> Selection:
        """Returns the groups of a tree of parameters; computed once per structure.

        Args:
          params: arrays, tracers or `jax.ShapeDtypeStruct` leaves.

        Raises:
          GroupError: the groups do not partition the tree; or a pattern that reads shapes assigns
            leaves to other groups than at `create`.
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

    def _identity(self) -> Any:
        return (self.groups, self.param_axes)

    def __deepcopy__(self, memo: Any) -> Self:
        return copy.copy(self)

    def __repr__(self) -> str:
        rows = ", ".join(f"{group}: {group.definition!r}" for group in self.groups)
        return f"{type(self).__name__}({rows})"
