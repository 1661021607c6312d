"""What becomes of each leaf of a state, and why: before anything is allocated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from opt_precision._formats import is_encoded
from opt_precision._init import bare_values
from opt_precision._select import path_str
from opt_precision._weights import Weights
from opt_precision._wrapper import Precise, Wrapper
from opt_precision.errors import PrecisionError


@dataclasses.dataclass(frozen=True)
class PrecisionRow:
    """One leaf of the state of the inner transformation, or what is kept besides a parameter.

    Attributes:
      path: of the leaf, as in Optax's state.
      shape: of it.
      role: `'moment'`, `'slow_moment'`, `'second_moment'`, `'parameter'`, or empty.
      stored: how: the codec and the block, or the dtype.
      rounding: `'stochastic'`, `'nearest'`, or empty where nothing is rounded.
      bytes: what it takes, scales included.
      reason: why it stays as it is.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    stored: str
    rounding: str
    bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """What becomes of each leaf; `print` shows it as a table.

    Attributes:
      rows: one per leaf of the state, and one per parameter that something is kept for.
      whole: the paths of the parameters whose updates are computed for whole leaves, since they
        need more than the same element of other arrays; all others go block by block. `None` where
        the update was not traced.
      parameters: the number of elements of the parameters.
    """

    rows: tuple[PrecisionRow, ...]
    whole: tuple[str, ...] | None
    parameters: int

    @property
    def bytes(self) -> int:
        """Bytes of the state."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        head = ("leaf", "shape", "role", "stored", "rounding", "bytes", "as it is since")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[k]) for row in cells) for k in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        each = self.bytes / max(1, self.parameters)
        lines.append(f"{self.bytes:,} bytes of state, {each:.2f} per parameter")
        if self.whole is None:
            lines.append("computed for whole leaves: not known without `extra_args` of the update")
        elif self.whole:
            lines.append(f"computed for whole leaves: {', '.join(self.whole)}")
        return "\n".join(lines)


def _cells(row: PrecisionRow) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "-"
    return row.path, shape, row.role, row.stored, row.rounding, f"{row.bytes:,}", row.reason


def explain_precision(tx: Any, params: Any, **extra_args: Any) -> PrecisionReport:
    """Returns what becomes of each leaf of a state, and why; nothing is allocated.

    Args:
      tx: a transformation of this package.
      params: the parameters; arrays or `jax.ShapeDtypeStruct`s.
      **extra_args: what the update needs besides gradients, such as `value=0.0`.

    Raises:
      PrecisionError: `tx` is not a transformation of this package.

    Examples:
      >>> import opt_precision
      >>> import optax
      >>> tx = opt_precision.quantize_state(optax.adam(1e-3), opt_precision.dynamic8())
      >>> print(explain_precision(tx, {'w': jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}))
      leaf     shape   role           stored        rounding    bytes   as it is since
      0/count  -                      int32                     4       mirrors no parameter
      0/mu/w   64x256  moment         dynamic8/256  nearest     16,640
      0/nu/w   64x256  second_moment  dynamic8/256  stochastic  16,640
      33,284 bytes of state, 2.03 per parameter
    """
    if not isinstance(tx, Precise):
        raise PrecisionError(
            "`tx` must be what `quantize_state`, `stochastic_weights` or `master_weights` "
            f"returned; found {type(tx).__name__}"
        )
    wrapper = tx.wrapper
    rows: list[PrecisionRow] = []
    whole: list[tuple[str, ...] | None] = []

    def look(params: Any) -> Any:
        state = wrapper.init(params)
        rows[:] = [*_state_rows(wrapper, state, params), *_weight_rows(wrapper.weights, params)]
        whole[:] = [_whole(wrapper, state, params, extra_args)]
        return 0

    jax.eval_shape(look, params)
    number = sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))
    return PrecisionReport(tuple(rows), whole[0], number)


def _state_rows(wrapper: Wrapper, state: Any, params: Any) -> list[PrecisionRow]:
    leaves = jax.tree.leaves(state.inner, is_leaf=is_encoded)
    return [
        _row(
            path_str(planned.path),
            leaf,
            planned.choice.role or "",
            "" if wrapper.moments is None else planned.choice.reason,
        )
        for planned, leaf in zip(wrapper.first(params)[1], leaves, strict=True)
    ]


def _row(path: str, leaf: Any, role: str = "", reason: str = "") -> PrecisionRow:
    """How a leaf is stored."""
    stored, rounding = leaf.dtype.name, ""
    if is_encoded(leaf):
        form, reason = leaf.format, ""
        stored, rounding = f"{form.kind}/{form.block}" if form.block else form.kind, form.rounding
    size = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(leaf))
    return PrecisionRow(path, tuple(leaf.shape), role, stored, rounding, size, reason)


def _weight_rows(weights: Weights, params: Any) -> list[PrecisionRow]:
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not weights.is_met_by(leaf.dtype):
            continue
        name, method = path_str(path), weights.method
        if weights.keeps:
            rows.append(_row(f"kept/{name}", weights.first_extra(leaf), "parameter"))
        else:
            shape = tuple(leaf.shape)
            rows.append(PrecisionRow(name, shape, "parameter", "bfloat16", method, 0, ""))
    return rows


def _whole(
    wrapper: Wrapper, state: Any, params: Any, extra_args: Mapping[str, Any]
) -> tuple[str, ...] | None:
    """The parameters whose updates need whole leaves, where that is known."""
    state, params = bare_values((state, params))
    grads = jax.tree.map(functools.partial(jnp.zeros_like, dtype=jnp.float32), params)
    try:
        step = wrapper.step(grads, state, params, extra_args, is_in_place=True)
        return tuple(step.whole_leaves())
    except TypeError:
        if extra_args:
            raise
        return None  # an update that needs more than gradients
