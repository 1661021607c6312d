"""Which dimensions of its parameter each leaf of a state keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from opt_optax_bridge._description.nodes import Names, Node

if TYPE_CHECKING:
    from opt_partition import Row  # the import takes 0.1 s

Shape: TypeAlias = tuple[int, ...]
Dims: TypeAlias = tuple[int | None, ...]


def explained(tx: Any, params: Any, leaves: Sequence[Any]) -> Sequence[Row] | None:
    """Returns the provenance of leaves in `init`; `None` if the state has grown since."""
    from opt_partition import explain

    numbers = jax.tree.map(lambda leaf: PartitionSpec(*map(str, range(len(leaf.shape)))), params)
    rows = explain(tx, params, numbers).rows
    return rows if [row.shape for row in rows] == [leaf.shape for leaf in leaves] else None


def stated_dimensions(node: Node, field: Names, shape: Shape, param_shape: Shape) -> Dims | None:
    """Returns the parameter dimensions that a leaf of an Optax state keeps; `None` if not stated.

    Assumes that enclosing transformations do not reshape parameters.
    """
    match node.name, field[0] if field else "":
        case "factored_rms", ("v_row" | "v_col") as name:
            return _factor(node, name, param_shape)
        case "factored_rms", "v":
            is_used = _factored(node, param_shape) is None
            return tuple(range(len(shape))) if is_used else (None,) * len(shape)
        case "sm3", "mu":
            return (int(field[-1]),)  # one vector per dimension
        case "lbfgs", ("diff_params_memory" | "diff_updates_memory"):
            return None, *range(len(param_shape))
        case "distance_over_gradients", "grad_sum_of_squares":
            return (None,)
    return tuple(range(len(shape))) if shape in (param_shape, ()) else None


def _factor(node: Node, name: str, param_shape: Shape) -> Dims:
    """The columns are averaged away in `v_row`, the rows in `v_col`."""
    factored = _factored(node, param_shape)
    if factored is None:
        return (None,)
    dropped = factored[1] if name == "v_row" else factored[0]
    return tuple(dim for dim in range(len(param_shape)) if dim != dropped)


def _factored(node: Node, param_shape: Shape) -> tuple[int, int] | None:
    """The second largest dimension and the largest; ties are broken as in Optax."""
    held = node.held
    if not held.get("factored", True) or len(param_shape) < 2:
        return None
    by_size = np.argsort(param_shape)
    row, column = int(by_size[-2]), int(by_size[-1])
    return (row, column) if param_shape[row] >= held["min_dim_size_to_factor"] else None
