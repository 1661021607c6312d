"""The table of groups, for people."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._fingerprint import fingerprint
from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.patterns import Rest, pattern_str
from opt_core._groups.selection import Part, has_shape
from opt_core._groups.table import Group
from opt_core._optimizer import Optimizer, OptimizerDef
from opt_core._paths import path_str

_WIDEST = 60
_NUMBERS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """One group of a tree of parameters.

    Attributes:
      name: the group's.
      pattern: which leaves it has, in words.
      paths: of its leaves, joined by `/`.
      elements: how many numbers these have; none where a leaf is a function, or the like.
      state_bytes: what its definition keeps for them, 0 where it is frozen.
      definition: the class of the definition, or `frozen`.
      hyper_params: by name, those at their defaults left out; all in words where they are no
        dataclass.
    """

    name: str
    pattern: str
    paths: tuple[str, ...]
    elements: int
    state_bytes: int
    definition: str
    hyper_params: str


@dataclasses.dataclass(frozen=True)
class GroupTable:
    """The groups of a tree of parameters; `str` is a table to print.

    Attributes:
      rows: one per group that has leaves, in order.
    """

    rows: tuple[GroupRow, ...]

    def __str__(self) -> str:
        head = ["group", "pattern", "leaves", "elements", "state", "definition", "hyper-parameters"]
        lines = [head, *(_cells(row) for row in self.rows), self._total()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        right = (2, 3, 4)
        return "\n".join(
            "  ".join(
                cell.rjust(w) if i in right else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def _total(self) -> list[str]:
        leaves = sum(len(row.paths) for row in self.rows)
        elements = sum(row.elements for row in self.rows)
        state = sum(row.state_bytes for row in self.rows)
        return ["total", "", f"{leaves:,}", f"{elements:,}", _size(state), "", ""]


def describe(optimizer: Optimizer) -> GroupTable:
    """Returns the table of an optimizer's groups; print it.

    Args:
      optimizer: one of a `MultiOptimizer`; leaves may be `jax.ShapeDtypeStruct` leaves. A nested
        one has its groups below it, named `outer/inner`.

    Raises:
      TypeError: the optimizer has no groups.

    Examples:
      >>> import jax.numpy as jnp
      >>> from opt_core import FROZEN, OptimizerState
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))
      >>> definition = MultiOptimizer.from_rules([('all', '.*w', Sgd(None))], rest=FROZEN)
      >>> print(describe(definition.create({'w': jnp.ones((4, 8)), 'b': jnp.ones(8)})))
      group  pattern   leaves  elements  state  definition  hyper-parameters
      all    '.*w'          1        32  128 B  Sgd
      rest   the rest       1         8    0 B  frozen
      total                 2        40  128 B
    """
    definition = optimizer.optimizer_def
    if not isinstance(definition, MultiOptimizer):
        raise TypeError(
            f"`optimizer` has no groups: its definition is a {type(definition).__name__}, no "
            "`MultiOptimizer`"
        )
    return GroupTable(tuple(_rows(definition, optimizer)))


def _rows(definition: MultiOptimizer, optimizer: Optimizer, outer: str = "") -> list[GroupRow]:
    selection = definition.select(optimizer.target)
    leaves = jax.tree.leaves(optimizer.target)
    split = definition.split(optimizer)
    rows = []
    for part in selection.parts:
        own = split.get(part.group.name)
        if own is not None and isinstance(own.optimizer_def, MultiOptimizer):
            rows += _rows(own.optimizer_def, own, f"{outer}{part.group.name}/")
        elif part.members or not isinstance(part.group.pattern, Rest):
            paths = tuple(path_str(selection.paths[i]) for i in part.members)
            sizes = [_elements(leaves[i]) for i in part.members]
            state = 0 if own is None else _bytes(own.state.param_states)
            rows.append(_row(part, outer, paths, sum(sizes), state))
    return rows


def _row(
    part: Part, outer: str, paths: tuple[str, ...], elements: int, state_bytes: int
) -> GroupRow:
    group: Group = part.group
    definition = "frozen" if group.is_frozen else type(group.definition).__name__
    return GroupRow(
        outer + group.name,
        pattern_str(group.pattern),
        paths,
        elements,
        state_bytes,
        definition,
        _hyper_params(group.definition),
    )


def _hyper_params(definition: Any) -> str:
    if not isinstance(definition, OptimizerDef) or definition.hyper_params is None:
        return ""
    hyper_params = definition.hyper_params
    if not dataclasses.is_dataclass(hyper_params):
        return str(hyper_params)
    named = ((f, getattr(hyper_params, f.name)) for f in dataclasses.fields(hyper_params))
    shown = [f"{f.name}={_value(value)}" for f, value in named if not _is_default(value, f)]
    return ", ".join(shown)


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    make = field.default_factory
    default = field.default if make is dataclasses.MISSING else make()
    return value is default or fingerprint(value) == fingerprint(default)


def _value(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return name if callable(value) and isinstance(name, str) else str(value)


def _bytes(tree: Any) -> int:
    return sum(_elements(x) * _itemsize(x) for x in jax.tree.leaves(tree))


def _elements(leaf: Any) -> int:
    return math.prod(np.shape(leaf)) if has_shape(leaf) or isinstance(leaf, _NUMBERS) else 0


def _itemsize(leaf: Any) -> int:
    if not isinstance(leaf, _NUMBERS):
        return int(leaf.dtype.itemsize) if has_shape(leaf) else 0
    return int(jnp.result_type(leaf).itemsize)  # of the array that it becomes


def _cells(row: GroupRow) -> list[str]:
    pattern = row.pattern if len(row.pattern) <= _WIDEST else row.pattern[: _WIDEST - 3] + "..."
    return [
        row.name,
        pattern,
        f"{len(row.paths):,}",
        f"{row.elements:,}",
        _size(row.state_bytes),
        row.definition,
        row.hyper_params,
    ]


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
