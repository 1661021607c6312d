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

from opt_partition._derivation import Derivation, Leaf, derive
from opt_partition._display import format_table
from opt_partition._init import StateMaker, init_of, params_of
from opt_partition._param_axes import Axis, Parameter, parameters
from opt_partition._rules import ASK, DEFAULT_RULES, Answer, Rules, apply_rules
from opt_partition._specs import itemsize
from opt_partition._symbols import Origin
from opt_partition._trees import path_str
from opt_partition.errors import UndecidedError

# From most to least trusted.
_SOURCES = ("scalar", "rule", "symbols", "provenance", "fallback")


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
      source: the least trusted of these: `'rule'`, `'symbols'`, `'provenance'` or `'fallback'`;
        `'scalar'` for a leaf without dimensions.
      note: additional explanation.
      is_disputed: whether a rule and the derivation disagree; the rule decided.
      is_doubted: whether a dimension has the size of a parameter dimension at these sizes alone,
        such as a rank that is capped, and therefore no name.
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
        return [row for row in self.rows if row.source == "fallback" or row.is_disputed]

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
      UndecidedError: with `strict`, the axes of some leaves could not be determined, or a rule and
        the derivation disagree.

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
        explanation = _explanation(derive(init, params, table), rules)
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


def _explanation(derivation: Derivation, rules: Rules) -> Explanation:
    owners = [leaf.parameter for leaf in derivation.leaves]
    answers = apply_rules(derivation.state, owners, rules)
    rows = [_row(leaf, answer) for leaf, answer in zip(derivation.leaves, answers, strict=True)]
    return Explanation(derivation.state, rows, derivation.evaluations, derivation.notes)


@dataclasses.dataclass(frozen=True)
class _Dimension:
    """The dimension of the parameter that a dimension is, its name, and who decided."""

    dim: int | None
    axis: Axis
    source: str
    note: str = ""
    is_disputed: bool = False


def _row(leaf: Leaf, answer: Answer) -> Row:
    shape, dtype, parameter = tuple(leaf.struct.shape), leaf.struct.dtype, leaf.parameter
    decided = [_decide(leaf, axis, answer) for axis in range(len(shape))]
    dims = tuple(each.dim for each in decided)
    sources = tuple(each.source for each in decided)
    notes = [
        f"dimension {axis}: {each.note}" if len(shape) > 1 else each.note
        for axis, each in enumerate(decided)
        if each.note
    ]
    dropped = (a for i, a in enumerate(parameter.axes) if i not in dims) if parameter else ()
    return Row(
        path=path_str(leaf.path),
        shape=shape,
        dtype=dtype,
        bytes=math.prod(shape) * itemsize(dtype),
        parameter=parameter.path if parameter else None,
        parameter_shape=parameter.shape if parameter else None,
        parameter_axes=parameter.given if parameter else None,
        dims=dims,
        axes=tuple(each.axis for each in decided),
        dropped=tuple(axis for axis in dropped if axis is not None),
        sources=sources,
        source=max(sources, key=_SOURCES.index, default="scalar"),
        note="; ".join(dict.fromkeys(notes)),
        is_disputed=any(each.is_disputed for each in decided),
        is_doubted=any(origin.is_doubted for origin in leaf.origins),
    )


def _decide(leaf: Leaf, axis: int, answer: Answer) -> _Dimension:
    """Decides one dimension: by the answer of a rule, else by its origin."""
    if isinstance(answer, PartitionSpec):
        return _Dimension(None, answer[axis], "rule", "named by the rule")
    origin, dim = leaf.origins[axis], leaf.dims[axis]
    if answer is not None and (said := answer[axis]) != ASK:
        assert not isinstance(said, str)
        name = leaf.parameter.axes[said] if leaf.parameter and said is not None else None
        # Rules exist for dimensions that follow nothing although their sizes do.
        is_disputed = said is not None and origin.is_known and dim != said
        verb = "say" if leaf.source == "symbols" else "says"
        note = f"rule says {said}, {leaf.source} {verb} {dim}" if is_disputed else ""
        return _Dimension(said, name, "rule", note, is_disputed)
    if dim is not None and leaf.parameter is not None:
        return _Dimension(dim, leaf.parameter.axes[dim], leaf.source)
    note = origin.note.replace("{}", _names(origin, leaf.parameter)) if origin.keys else origin.note
    if origin.key is not None:
        return _Dimension(None, origin.key[0], leaf.source)
    return _Dimension(None, None, leaf.source if origin.is_known else "fallback", note)


def _names(origin: Origin, parameter: Parameter | None) -> str:
    """Returns the parameter dimensions that a dimension is computed from."""
    keys = [*zip(parameter.axes, parameter.shape, strict=True)] if parameter else []
    dims = [str(dim) for dim, key in enumerate(keys) if key in origin.keys]
    return ", ".join(dims + [repr(key[0]) for key in origin.keys if key not in keys])


def _spec_str(axes: Sequence[Axis]) -> str:
    return f"({', '.join('-' if axis is None else str(axis) for axis in axes)})"
