"""The logical axes of any optimizer state, with an explanation of how they were derived."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._axes.attribution import SOURCES, Attribution, Attributions, attribute
from opt_partition._axes.param_axes import Axis, parameters
from opt_partition._axes.rules import DEFAULT_RULES, Rules
from opt_partition._display import format_table
from opt_partition._init import StateMaker, init_of, params_of
from opt_partition._specs import itemsize
from opt_partition._trees import path_str
from opt_partition.errors import UndecidedError


@dataclasses.dataclass(frozen=True)
class Row:
    """The axes of one state leaf, and how they were derived.

    Attributes:
      path: `/`-joined keys of the leaf.
      shape: its shape.
      dtype: its dtype.
      bytes: its size in bytes.
      parameter: path of the parameter that it belongs to, or `None`.
      parameter_shape: shape of that parameter.
      parameter_axes: axes of that parameter, as given.
      dims: for each dimension the parameter dimension that it indexes, or `None`.
      axes: for each dimension its logical name, or `None`.
      dropped: names of parameter dimensions that the leaf does not have.
      sources: for each dimension the source that decided.
      source: the least trusted of these: `'rule'`, `'provenance'`, `'differencing'`, `'alignment'`
        or `'fallback'`; `'scalar'` for a leaf without dimensions.
      note: additional explanation.
      is_disputed: whether two sources disagree; the more trusted one decided.
      is_doubted: whether a dimension was decided by equal sizes alone although changing sizes did
        not confirm it; `note` says what was observed.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    parameter: str | None
    parameter_shape: tuple[int, ...] | None
    parameter_axes: PartitionSpec | None
    dims: tuple[int | None, ...]
    axes: tuple[Axis, ...]
    dropped: tuple[Axis, ...]
    sources: tuple[str, ...]
    source: str
    note: str
    is_disputed: bool
    is_doubted: bool

    @property
    def is_mirror(self) -> bool:
        """Whether the leaf has exactly the dimensions of its parameter, in order."""
        return self.shape == self.parameter_shape and self.dims == tuple(range(len(self.shape)))

    @property
    def spec(self) -> PartitionSpec:
        """The axes as a spec; `P()` if no dimension follows a parameter dimension."""
        if all(dim is None for dim in self.dims) and not any(self.axes):
            return PartitionSpec()
        return PartitionSpec(*self.axes)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The logical axes of a state, and how they were derived; prints as a table.

    Attributes:
      state: the state, as `jax.ShapeDtypeStruct`s.
      rows: one row per leaf, in JAX's order.
      evaluations: number of abstract evaluations of `init`, which is never executed.
      notes: notes on the state as a whole.
    """

    state: Any
    rows: list[Row]
    evaluations: int
    notes: tuple[str, ...] = ()

    @property
    def axes(self) -> Any:
        """A `PartitionSpec` of logical names per leaf, in the structure of the state."""
        return jax.tree.unflatten(jax.tree.structure(self.state), [row.spec for row in self.rows])

    @property
    def undecided(self) -> list[Row]:
        """The rows for which `strict=True` raises an error."""
        return [
            row
            for row in self.rows
            if row.source == "fallback" or row.is_disputed or row.is_doubted
        ]

    def to_json(self, indent: int | None = 2) -> str:
        """Returns everything except the trees as JSON."""
        rows = [_to_data(row) for row in self.rows]
        data = {"rows": rows, "evaluations": self.evaluations, "notes": self.notes}
        return json.dumps(data, indent=indent)

    def __str__(self) -> str:
        head = ["state", "shape", "dtype", "parameter", "axes", "source", "note"]
        lines = [
            [
                row.path,
                str(row.shape),
                str(row.dtype),
                row.parameter or "",
                _spec_str(row.axes),
                row.source,
                row.note,
            ]
            for row in self.rows
        ]
        total = sum(row.bytes for row in self.rows)
        end = f"{len(self.rows)} leaves, {total:,} bytes; `init` evaluated {self.evaluations} times"
        return "\n".join([format_table(head, lines), *self.notes, end])


def explain(
    tx: StateMaker,
    params: Any,
    param_axes: Any,
    *,
    rules: Rules = DEFAULT_RULES,
    strict: bool = False,
) -> Explanation:
    """Derives the logical axes of an optimizer state, with an explanation for each leaf.

    Allocates nothing and uses no device.

    Args:
      tx: an Optax transformation or its `init`; an `opt_core.OptimizerDef`, whose state has a step
        besides; or an `opt_core.Optimizer`.
      params: arrays or `jax.ShapeDtypeStruct`s. `None` for those of an optimizer.
      param_axes: logical axes of each parameter, in a tree with the same keys: `PartitionSpec`s,
        tuples of names, Flax boxes, or `None`.
      rules: rules for types of state whose dimensions cannot be derived.
      strict: whether to raise an error if the axes of a leaf could not be determined.

    Returns:
      An `Explanation` with the axes, a row per leaf, and the number of evaluations of `init`.

    Raises:
      AxesError: `param_axes` do not match `params`.
      UndecidedError: with `strict`, some leaves were decided by the fallback only, by sources that
        disagree, or by equal sizes alone against the evidence.

    Examples:
      >>> import optax
      >>> params = {'w': jax.ShapeDtypeStruct((256, 384), 'float32')}
      >>> adafactor = explain(optax.adafactor(1e-3), params, {'w': ('embed', 'mlp')})
      >>> [(row.path, row.axes) for row in adafactor.rows if row.shape == (256,)]
      [('0/v_row/w', ('embed',))]
    """
    init, params = init_of(tx), params_of(tx, params)
    if not isinstance(rules, Rules):
        raise TypeError(
            f"`rules` must be `Rules`; got {type(rules).__name__}. Use `DEFAULT_RULES.extend(...)`."
        )
    table = parameters(params, param_axes)
    with _collector_paused():
        explanation = to_explanation(attribute(init, params, table, rules))
    if strict and explanation.undecided:
        lines = [f"  {row.path} {row.shape}: {row.note}" for row in explanation.undecided]
        raise UndecidedError(
            "the axes of these state leaves could not be determined:\n"
            + "\n".join(lines)
            + "\nPass a rule for their type: `rules=DEFAULT_RULES.extend({MyState: rule})`."
        )
    return explanation


def derive_logical_axes(
    tx: StateMaker,
    params: Any,
    param_axes: Any,
    *,
    rules: Rules = DEFAULT_RULES,
    strict: bool = False,
) -> Any:
    """Returns the logical axes of every leaf of an optimizer state; see `explain`.

    Returns:
      A tree with the structure of the state and a `PartitionSpec` of logical names per leaf: `None`
      for a dimension that follows no parameter dimension, `P()` for a leaf that follows no
      parameter.

    Examples:
      >>> import optax
      >>> params = {'w': jax.ShapeDtypeStruct((256, 384), 'float32')}
      >>> axes = derive_logical_axes(optax.adamw(1e-3), params, {'w': ('embed', 'mlp')})
      >>> tuple(axes[0].count), tuple(axes[0].mu['w'])
      ((), ('embed', 'mlp'))
    """
    return explain(tx, params, param_axes, rules=rules, strict=strict).axes


def to_explanation(found: Attributions) -> Explanation:
    """Converts attributions to an `Explanation`."""
    rows = [_row(attribution) for attribution in found.leaves]
    return Explanation(found.state, rows, found.evaluations, found.notes)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses garbage collection, as tracing creates many long-lived objects.

    Scanning them repeatedly takes a third of the time for 10,000 leaves.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _to_data(row: Row) -> dict[str, Any]:
    """Returns a row as JSON data."""
    data = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    axes = row.parameter_axes
    return data | {"dtype": str(row.dtype), "parameter_axes": None if axes is None else [*axes]}


def _row(found: Attribution) -> Row:
    shape, dtype = tuple(found.leaf.shape), found.leaf.dtype
    parameter, dimensions = found.parameter, found.dimensions
    sources = tuple(d.source for d in dimensions)
    dims = tuple(d.dim for d in dimensions)
    kept = {*dims}
    notes = [
        f"dimension {axis}: {d.note}" if len(shape) > 1 else d.note
        for axis, d in enumerate(dimensions)
        if d.note
    ]
    return Row(
        path=path_str(found.key_path),
        shape=shape,
        dtype=dtype,
        bytes=math.prod(shape) * itemsize(dtype),
        parameter=parameter.path if parameter else None,
        parameter_shape=parameter.shape if parameter else None,
        parameter_axes=parameter.given if parameter else None,
        dims=dims,
        axes=tuple(d.axis for d in dimensions),
        dropped=tuple(a for i, a in enumerate(parameter.axes) if i not in kept and a is not None)
        if parameter
        else (),
        sources=sources,
        source=max(sources, key=SOURCES.index, default="scalar"),
        note="; ".join(dict.fromkeys(notes)),
        is_disputed=any(d.is_disputed for d in dimensions),
        is_doubted=any(d.is_doubted for d in dimensions),
    )


def _spec_str(axes: Sequence[Axis]) -> str:
    return f"({', '.join('-' if axis is None else str(axis) for axis in axes)})"
