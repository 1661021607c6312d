"""The rows of a memory plan: the cost of every leaf, and why it is not sharded further."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from opt_partition._axes.explain import Explanation
from opt_partition._memory.plan import NO_PARAMETER, Kind, PlanRow
from opt_partition._mesh.layout import Layout, LeafLayout
from opt_partition._mesh.rule_table import LogicalAxisRules
from opt_partition._mesh.specs import AnyMesh, manual_axes, mesh_axes_of, named_sizes


class RowMaker:
    """Creates the rows of a plan.

    Args:
      rules: rules from logical names to mesh axes.
      mesh: the mesh.
      zero: for each kind, the mesh axes that its leaves were extended over.
      group_by: returns the group of a parameter for its path.
    """

    def __init__(
        self,
        rules: LogicalAxisRules,
        mesh: AnyMesh,
        zero: Mapping[Kind, Sequence[str]],
        group_by: Callable[[str], str],
    ) -> None:
        pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
        self._sharded = {name for name, axes in pairs if mesh_axes_of(axes)}
        self._in_rules = {axis for _, axes in pairs for axis in mesh_axes_of(axes)}
        self._zero = zero
        self._mesh = mesh
        manual = manual_axes(mesh)
        self._sizes = {
            axis: size for axis, size in mesh.shape.items() if size > 1 and axis not in manual
        }
        self._ways = math.prod(self._sizes.values())
        self._group_by = group_by

    def of_params(self, kind: Kind, layout: Layout, axes: Any) -> Iterator[PlanRow]:
        """Yields the rows of a tree with the structure and logical axes of the parameters."""
        names = [tuple(spec) for spec in jax.tree.leaves(axes)]
        paths = [leaf.path for leaf in layout.rows]
        return self._rows(kind, layout, names, paths, [kind] * len(paths))

    def of_state(
        self, layout: Layout, explanation: Explanation, fields: Sequence[str]
    ) -> Iterator[PlanRow]:
        """Yields the rows of an optimizer state, given the field of each leaf."""
        names = [row.axes for row in explanation.rows]
        parameters = [row.parameter for row in explanation.rows]
        return self._rows("state", layout, names, parameters, fields)

    def _rows(
        self,
        kind: Kind,
        layout: Layout,
        axes: Iterable[tuple[Any, ...]],
        parameters: Iterable[str | None],
        fields: Iterable[str],
    ) -> Iterator[PlanRow]:
        for leaf, names, parameter, field in zip(
            layout.rows, axes, parameters, fields, strict=True
        ):
            waste = leaf.bytes_per_device - -(-leaf.bytes // self._ways)
            yield PlanRow(
                kind=kind,
                leaf=leaf,
                axes=names,
                parameter=parameter,
                group=NO_PARAMETER if parameter is None else self._group_of(parameter),
                field=field,
                waste=waste,
                reason=self._reason(kind, leaf, names) if waste else "",
            )

    def _group_of(self, parameter: str) -> str:
        group: object = self._group_by(parameter)
        if not isinstance(group, str):
            raise TypeError(
                "`group_by` must return a string, the name of a group, for every parameter path; "
                f"for {parameter!r} it returned {group!r}, a {type(group).__name__}"
            )
        return group

    def _reason(self, kind: Kind, leaf: LeafLayout, names: tuple[Any, ...]) -> str:
        """Returns the mesh axes that a leaf is not sharded over, and why."""
        used = {axis for entry in leaf.spec for axis in mesh_axes_of(entry)}
        free = [axis for axis in self._sizes if axis not in used]
        where = f"not over {named_sizes(self._mesh, free)}"
        if not leaf.shape:
            return f"{where}: a scalar"
        whole = [
            name for entry in names for name in mesh_axes_of(entry) if name not in self._sharded
        ]
        why = list(leaf.notes)
        if whole:
            why.append("no rule shards " + ", ".join(map(repr, dict.fromkeys(whole))))
        if not any(names):
            why.append("no dimension has a logical name")
        zero = set(self._zero.get(kind, ()))
        if zero and not zero & used:
            why += leaf.actions
        idle = [axis for axis in free if axis not in self._in_rules | zero]
        if idle:
            why.append("no rule uses " + ", ".join(map(repr, idle)))
        return f"{where}: {'; '.join(why)}" if why else where
