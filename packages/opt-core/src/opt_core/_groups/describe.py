"""The printed table of groups."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._fingerprint import fingerprint
from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.patterns import Rest, has_shape, pattern_str
from opt_core._optimizer import Optimizer
from opt_core._paths import aligned, path_str
from opt_core.errors import OptimizerError

_WIDEST = 60
_NUMBERS = (bool, int, float, complex)


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """One group of a tree of parameters.

    Attributes:
      name: of the group.
      pattern: the leaves that it selects, as text.
      paths: of its leaves, joined by `/`.
      elements: the number of elements of its leaves; leaves that are not arrays count 0.
      state_bytes: the size of its state, 0 if it is frozen.
      definition: the class of the definition, or `frozen`.
      hyper_params: by name, without those at their defaults; for a schedule its name and, if the
        state is known, the value of the next update. Plain text if they are not a dataclass.
      precision: how its parameters and state are stored (`OptimizerDef.precision`), as text; empty
        if as the definition does by itself.
    """

    name: str
    pattern: str
    paths: tuple[str, ...]
    elements: int
    state_bytes: int
    definition: str
    hyper_params: str
    precision: str = ""


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
        if any(row.precision for row in self.rows):
            stored = ["precision", *(row.precision for row in self.rows), ""]
            lines = [[*line[:-1], cell, line[-1]] for line, cell in zip(lines, stored, strict=True)]
        return "\n".join(aligned(lines, "<<>>>" + "<" * (len(lines[0]) - 5)))

    def _total(self) -> list[str]:
        leaves = sum(len(row.paths) for row in self.rows)
        elements = sum(row.elements for row in self.rows)
        state = sum(row.state_bytes for row in self.rows)
        return ["total", "", f"{leaves:,}", f"{elements:,}", _size(state), "", ""]


def describe(optimizer: Optimizer) -> GroupTable:
    """Returns the table of an optimizer's groups; print it.

    Args:
      optimizer: one of a `MultiOptimizer`; leaves may be `jax.ShapeDtypeStruct` leaves. Groups of a
        nested one are listed below it as `outer/inner`.

    Raises:
      TypeError: the optimizer has no groups.

    Examples:
      >>> import jax.numpy as jnp
      >>> from opt_core import FROZEN, OptimizerDef, OptimizerState
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
            f"`optimizer` has no groups: its definition is of type {type(definition).__name__}, "
            "not a `MultiOptimizer`. Groups inside of a chain are not listed: describe "
            "an optimizer of the `MultiOptimizer` alone"
        )
    return GroupTable(tuple(_rows(definition, optimizer)))


def _rows(definition: MultiOptimizer, optimizer: Optimizer, outer: str = "") -> list[GroupRow]:
    division = definition.division(optimizer.state)
    leaves = division.leaves(optimizer.target)
    split = definition.split(optimizer)
    rows = []
    for group in definition.groups:
        members, part = division.members[group.name], split.get(group.name)
        if part is not None and isinstance(part.optimizer_def, MultiOptimizer):
            rows += _rows(part.optimizer_def, part, f"{outer}{group.name}/")
        elif members or not isinstance(group.pattern, Rest):
            precision = group.definition.precision
            rows.append(
                GroupRow(
                    name=outer + group.name,
                    pattern=pattern_str(group.pattern),
                    paths=tuple(path_str(division.paths[i]) for i in members),
                    elements=sum(_elements(leaves[i]) for i in members),
                    state_bytes=0 if part is None else _bytes(part.state.param_states),
                    definition="frozen" if part is None else type(group.definition).__name__,
                    hyper_params="" if part is None else _hyper_params(part),
                    precision="" if precision is None else _value(precision, None),
                )
            )
    return rows


def _hyper_params(optimizer: Optimizer) -> str:
    hyper_params = optimizer.optimizer_def.hyper_params
    if hyper_params is None:
        return ""
    if not dataclasses.is_dataclass(hyper_params):
        return str(hyper_params)
    named = [(f, getattr(hyper_params, f.name)) for f in dataclasses.fields(hyper_params)]
    has_schedule = any(callable(value) for _, value in named)
    used = _used(optimizer) if has_schedule else None
    return ", ".join(
        f"{field.name}={_value(value, getattr(used, field.name, None))}"
        for field, value in named
        if not _is_default(value, field)
    )


def _used(optimizer: Optimizer) -> Any:
    """The hyper-parameters of the next update, if they can be known."""
    definition = optimizer.optimizer_def
    leaves = jax.tree.leaves(optimizer)
    if any(isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer) for leaf in leaves):
        return None
    try:
        return definition.resolve_hyper_params(
            definition.hyper_params, optimizer.target, optimizer.state
        )
    except OptimizerError:  # the update needs more than gradients
        return None


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    make = field.default_factory
    default = field.default if make is dataclasses.MISSING else make()
    return value is default or fingerprint(value) == fingerprint(default)


def _value(value: Any, used: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(name, str):
        return str(value)
    name = name.partition(".<locals>")[0]  # what a factory made
    return name if used is None or callable(used) else f"{float(used):.6g} ({name})"


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
