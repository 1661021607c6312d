"""The printed table of groups."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from opt_core._closures import fingerprint
from opt_core._gradients import gradient_leaves
from opt_core._groups.multi_optimizer import MultiOptimizer
from opt_core._groups.table import Division, Rest, has_shape, pattern_str
from opt_core._optimizer import Optimizer
from opt_core._trees import aligned, path_str
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


# Norms of gradients, parameters and updates.


class GroupNorms(flax.struct.PyTreeNode):
    """Euclidean norms over all leaves of one group, float32 scalars.

    Attributes:
      gradient: of the gradients; for a frozen group of those present.
      parameter: of the parameters before the update.
      update: of the change of the parameters.
      update_to_parameter: `update / parameter`; 0 where the parameters are all zero.
    """

    gradient: jax.Array
    parameter: jax.Array
    update: jax.Array
    update_to_parameter: jax.Array


def group_metrics(before: Optimizer, grads: Any, after: Optimizer) -> dict[str, GroupNorms]:
    """Returns the norms of gradient, parameter and update of every group.

    Every array is read once. Sums are in float32, in float64 for float64 leaves. Traceable: call
    it in the training step, where XLA joins it with the update.

    Args:
      before: an optimizer; one that is not a `MultiOptimizer` is a single group, `'rest'`.
      grads: the gradients of the update, like its `target`.
      after: what `before.apply_gradient(grads)` returned.

    Returns:
      Norms by group name, in the order of the groups, frozen groups included; a group without any
      leaf is left out. An `OrderedDict`, which keeps its order under `jax.jit`.

    Raises:
      TreeMismatchError: `grads` do not have the containers of the parameters.

    Examples:
      >>> from opt_core import MultiOptimizer, OptimizerDef, OptimizerState
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(jnp.zeros((), jnp.int32), ())
      ...     def apply_gradient(self, hyper_params, params, state, grads):
      ...         return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), state
      >>> definition = MultiOptimizer(('w', Sgd(None)), names=['weights'])
      >>> before = definition.create({'w': jnp.array([4.0, 0.0]), 'b': jnp.ones(4)})
      >>> grads = {'w': jnp.array([3.0, 4.0])}
      >>> found = group_metrics(before, grads, before.apply_gradient(grads))
      >>> {name: [float(x) for x in jax.tree.leaves(norms)] for name, norms in found.items()}
      {'weights': [5.0, 4.0, 2.5, 0.625], 'rest': [0.0, 2.0, 0.0, 0.0]}
    """
    division = _division(before)
    gradients = gradient_leaves(before.target, grads, optional=frozenset(division.frozen))
    old, new = jax.tree.leaves(before.target), jax.tree.leaves(after.target)
    norms = OrderedDict[str, GroupNorms]()  # of a dict, `jax.jit` sorts the keys
    for name, members in division.members.items():
        if not members:
            continue
        updates = [(new[i], old[i]) for i in members] if name in division.trained else []
        parameter = _norm([(old[i],) for i in members])
        update = _norm(updates)
        ratio = jnp.where(parameter > 0, update / jnp.where(parameter > 0, parameter, 1), 0)
        gradient = _norm([(gradients[i],) for i in members if gradients[i] is not None])
        norms[name] = GroupNorms(gradient, parameter, update, ratio)
    return norms


class ClipMetrics(flax.struct.PyTreeNode):
    """What clipping by a global norm does to the gradients of a step, float32 scalars.

    Attributes:
      norm: the global norm of the gradients.
      clipped: 1 if that is above the bound, else 0: its mean over steps is the rate of clipping.
      factor: by what the gradients are multiplied.
    """

    norm: jax.Array
    clipped: jax.Array
    factor: jax.Array


def clip_metrics(norms: Mapping[str, GroupNorms], max_norm: Any) -> ClipMetrics:
    """Returns what clipping does to gradients whose norms are known; reads no gradient again.

    Args:
      norms: what `group_metrics` returned, of gradients before they are clipped. Clipped together
        are all groups in it: leave out those that are clipped by themselves, or not at all.
      max_norm: the bound, as of `optax.clip_by_global_norm`.

    Examples:
      >>> norms = [GroupNorms(jnp.float32(x), *jnp.zeros(3)) for x in (3.0, 4.0)]
      >>> found = clip_metrics(dict(zip('ab', norms)), 2.5)
      >>> [float(x) for x in jax.tree.leaves(found)]
      [5.0, 1.0, 0.5]
    """
    norm = jnp.zeros((), jnp.float32)
    for group in norms.values():
        norm = jnp.hypot(norm, group.gradient)  # no square that overflows
    is_above = norm > max_norm
    factor = jnp.where(is_above, max_norm / norm, 1)
    return ClipMetrics(norm, is_above.astype(jnp.float32), factor.astype(jnp.float32))


def _division(optimizer: Optimizer) -> Division:
    """The groups of any optimizer; one without groups is a single one."""
    definition = optimizer.optimizer_def
    if isinstance(definition, MultiOptimizer):
        return definition.division(optimizer.state)
    treedef: Any = jax.tree.structure(optimizer.target)
    return Division(("rest",), ("rest",), (0,) * treedef.num_leaves, treedef)


def _norm(terms: list[tuple[Any, ...]]) -> jax.Array:
    """The norm of all leaves, or of all differences of two leaves."""
    squares = [_square(*term) for term in terms if _is_float(term[0])]
    if not squares:
        return jnp.zeros((), jnp.float32)
    total = squares[0]
    for square in squares[1:]:
        total = total + square.astype(total.dtype)
    return jnp.sqrt(total).astype(jnp.float32)


def _square(leaf: Any, minus: Any = None) -> jax.Array:
    dtype = jnp.result_type(leaf)
    dtype = jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
    value = jnp.asarray(leaf, dtype)
    if minus is not None:
        value = value - jnp.asarray(minus, dtype)
    return jnp.sum(jnp.real(value * jnp.conj(value)))


def _is_float(leaf: Any) -> bool:
    is_number = has_shape(leaf) or isinstance(leaf, float | complex)
    return is_number and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))
