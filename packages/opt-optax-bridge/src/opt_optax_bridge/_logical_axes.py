"""Logical axes of an optimizer in T5X's form: `None` for whatever follows no parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from opt_partition import Row  # imported when it is needed: it takes a tenth of a second


def derive_axes(tx: Any, params: Any, state: Any, param_axes: Any) -> tuple[Any, Any]:
    """Returns the axes of the parameters and of the state, in their own containers.

    Args:
      tx: the transformation.
      params: parameters; arrays or `jax.ShapeDtypeStruct` leaves.
      state: the state of `tx` for them.
      param_axes: a `PartitionSpec` (or `None`) per parameter; containers may be of another kind.

    Returns:
      The parameters' axes as they were given, and for every leaf of the state a spec, or `None`
      where it follows no parameter. A leaf with all dimensions of its parameter has the axes of
      that as they were given.

    Raises:
      opt_partition.errors.AxesError: `param_axes` do not fit the parameters; lists the paths.
      ValueError: `state` is not one that `tx` makes of such parameters.
    """
    from opt_partition import explain, normalise_param_axes

    explanation = explain(tx, params, param_axes)
    found: Any = jax.tree.structure(state)
    expected: Any = jax.tree.structure(explanation.state)
    if found != expected:
        raise ValueError(
            "`optimizer` holds a state that its transformation does not make of its parameters.\n"
            f"  expected {expected}\n  found {found}"
        )
    target = normalise_param_axes(params, param_axes, pad=False)
    return target, jax.tree.unflatten(found, [_spec(row) for row in explanation.rows])


def _spec(row: Row) -> PartitionSpec | None:
    if row.is_mirror:
        return row.parameter_axes
    return row.spec if row.spec != PartitionSpec() else None
