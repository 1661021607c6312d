"""The logical axes of any optimizer state, with an explanation of how they were derived."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._derivation import Derivation, derive
from opt_partition._display import format_table, plain
from opt_partition._init import StateMaker, init_of
from opt_partition._layout import itemsize
from opt_partition._param_axes import Axis, axes_of, parameters
from opt_partition._rules import ASK, Answer, Rule, apply_rules
from opt_partition._symbols import Key, Origin, Origins, keys_of
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
      dims: for each dimension the parameter dimension that it indexes, or `None`.
      axes: for each dimension its logical name, or `None`.
      dropped: names of parameter dimensions that the leaf does not have.
      sources: for each dimension the source that decided.
      source: the least trusted of these: `'rule'`, `'symbols'`, `'provenance'` or `'fallback'`;
        `'scalar'` for a leaf without dimensions.
      note: additional explanation.
      is_disputed: whether a rule and the derivation disagree; the rule decided.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    parameter: str | None
    dims: tuple[int | None, ...]
    axes: tuple[Axis, ...]
    dropped: tuple[Axis, ...]
    sources: tuple[str, ...]
    source: str
    note: str
    is_disputed: bool

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
      param_axes: the axes of the parameters, as by `normalise_param_axes`.
      evaluations: number of abstract evaluations of `init`, which is never executed.
      notes: notes on the state as a whole.
    """

    state: Any
    rows: list[Row]
    param_axes: Any
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
        rows = [{name: plain(value) for name, value in vars(row).items()} for row in self.rows]
        data = {"rows": rows, "evaluations": self.evaluations, "notes": self.notes}
        return json.dumps(data, indent=indent, default=str)

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            axes = ", ".join("-" if axis is None else str(axis) for axis in row.axes)
            cells = [row.path, str(row.shape), str(row.dtype), row.parameter or ""]
            lines.append([*cells, f"({axes})", row.source, row.note])
        head = ["state", "shape", "dtype", "parameter", "axes", "source", "note"]
        total = sum(row.bytes for row in self.rows)
        end = f"{len(self.rows)} leaves, {total:,} bytes; `init` evaluated {self.evaluations} times"
        return "\n".join([format_table(head, lines), *self.notes, end])


def explain(
    tx: StateMaker,
    params: Any,
    param_axes: Any,
    *,
    rules: Mapping[Any, Rule] | None = None,
    strict: bool = False,
) -> Explanation:
    """Derives the logical axes of an optimizer state, with an explanation for each leaf.

    Allocates nothing and uses no device.

    Args:
      tx: an Optax transformation or its `init`; or an `opt_core.OptimizerDef`, whose state has a
        step besides.
      params: arrays or `jax.ShapeDtypeStruct`s.
      param_axes: logical axes of each parameter, in a tree with the same keys: `PartitionSpec`s,
        tuples of names, Flax boxes, or `None`.
      rules: for types of state whose dimensions cannot be derived, a function of a `StateLeaf`. It
        takes precedence over all other sources, and returns one of: for each dimension of the leaf,
        the parameter dimension that it indexes, `None` if it indexes none, or `ASK` to leave it to
        the other sources; a `PartitionSpec` of names; or `None`, to leave the leaf to them.
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
    init = init_of(tx)
    by_type: Any = rules or {}
    if not isinstance(by_type, Mapping) or not all(isinstance(kind, type) for kind in by_type):
        raise TypeError(
            f"rules by type must be a dict of types and functions, {{MyState: rule}}; got {rules!r}"
        )
    # Tracing creates many long-lived objects. Scanning them repeatedly takes half of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        table = parameters(params, param_axes)
        derivation = derive(init, params, table)
        rows, named = list(_rows(derivation, by_type)), axes_of(params, table)
    finally:
        if was_enabled:
            gc.enable()
    state, evaluations, notes = derivation.state, derivation.evaluations, derivation.notes
    explanation = Explanation(state, rows, named, evaluations, notes)
    if strict and explanation.undecided:
        lines = ["the axes of these state leaves could not be determined:"]
        by_path = {parameter.path: parameter for parameter in table}
        for row in explanation.undecided:
            lines.append(f"  {row.path} {row.shape}: {row.note}")
            if parameter := by_path.get(row.parameter or ""):
                shape, axes = parameter.shape, parameter.axes
                lines[-1] += f"; parameter {row.parameter} of shape {shape} has axes {axes}"
        raise UndecidedError(
            "\n".join([*lines, "Pass a rule for their type: `rules={MyState: rule}`."])
        )
    return explanation


def derive_logical_axes(
    tx: StateMaker,
    params: Any,
    param_axes: Any,
    *,
    rules: Mapping[Any, Rule] | None = None,
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


def _rows(derivation: Derivation, rules: Mapping[Any, Rule]) -> Iterator[Row]:
    decide = functools.cache(_decide)  # most leaves of a model are alike
    for (path, leaf), origins, source, owner, answer in zip(
        jax.tree_util.tree_leaves_with_path(derivation.state),
        derivation.origins,
        derivation.sources,
        derivation.owners,
        apply_rules(derivation.state, derivation.owners, rules),
        strict=True,
    ):
        yield Row(
            path=path_str(path),
            shape=leaf.shape,
            dtype=leaf.dtype,
            bytes=math.prod(leaf.shape) * itemsize(leaf.dtype),
            parameter=owner.path if owner else None,
            **decide(
                leaf.shape,
                origins,
                source,
                owner.axes if owner else (),
                owner.shape if owner else (),
                answer,
            ),
        )


def _decide(
    shape: tuple[int, ...],
    origins: Origins,
    source: str,
    names: tuple[Axis, ...],
    sizes: tuple[int, ...],
    answer: Answer,
) -> dict[str, Any]:
    """Returns the fields of a row that are decided: by the answer of a rule, else by origins."""
    keys = keys_of(names, sizes)
    is_alike = bool(names) and shape == sizes
    dims = _dims(origins, keys, is_alike=is_alike)
    is_captured = is_alike and not any(origin.keys for origin in origins) and {*dims} == {None}
    decided: list[tuple[int | None, Axis, str, str]] = []
    is_disputed = False
    for axis, (origin, dim) in enumerate(zip(origins, dims, strict=True)):
        if isinstance(answer, PartitionSpec):
            decided.append((None, answer[axis], "rule", "named by the rule"))
        elif answer is not None and (said := answer[axis]) != ASK:
            assert not isinstance(said, str)
            # Rules exist for dimensions that follow nothing although their sizes do.
            differs = said is not None and origin.is_known and dim != said
            verb = "say" if source == "symbols" else "says"
            note = f"rule says {said}, {source} {verb} {dim}" if differs else ""
            decided.append((said, None if said is None else names[said], "rule", note))
            is_disputed |= differs
        elif dim is not None:
            decided.append((dim, names[dim], source, ""))
        elif origin.key is not None:
            decided.append((None, origin.key[0], source, ""))
        else:
            from_dims = [str(dim) for dim, key in enumerate(keys) if key in origin.keys]
            from_dims += [repr(key[0]) for key in origin.keys if key not in keys]
            note = origin.note.replace("{}", ", ".join(from_dims)) if from_dims else origin.note
            is_known = origin.is_known and not is_captured
            note = note or _CAPTURED * is_captured
            decided.append((None, None, source if is_known else "fallback", note))
    kept, axes, sources, notes = zip(*decided, strict=True) if decided else ((), (), (), ())
    if len(decided) > 1:
        notes = tuple(f"dimension {n}: {note}" * bool(note) for n, note in enumerate(notes))
    return {
        "dims": kept,
        "axes": axes,
        "dropped": tuple(a for dim, a in enumerate(names) if a is not None and dim not in kept),
        "sources": sources,
        "source": max(sources, key=_SOURCES.index, default="scalar"),
        "note": "; ".join(dict.fromkeys(filter(None, notes))),
        "is_disputed": is_disputed,
    }


_CAPTURED = "of the size of its parameter, but `init` does not take it from its argument"


def _dims(
    origins: Origins, keys: Sequence[Key | None], *, is_alike: bool
) -> tuple[int | None, ...]:
    """Returns the dimension of a parameter with `keys` that each dimension of a leaf is."""
    if is_alike and all(map(_may_be, origins, keys)):
        return tuple(range(len(keys)))
    dims: list[int | None] = []
    for origin in origins:
        same = [dim for dim, key in enumerate(keys) if key is not None and key == origin.key]
        unused = [dim for dim in same if dim not in dims]
        dims.append(next(iter([*unused, *same]), None))
    return tuple(dims)


def _may_be(origin: Origin, key: Key | None) -> bool:
    """Whether a dimension may be that with a key; one without a name is a number."""
    if origin.keys:
        return origin.key == key
    return origin.is_known and (key is None or key[1] < 2)
