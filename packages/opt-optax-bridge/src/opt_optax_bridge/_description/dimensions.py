"""Which dimensions of its parameter each leaf of a state keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec
from opt_core import Role, flatten_with_paths, path_str

from opt_optax_bridge._description.nodes import Names, Node

if TYPE_CHECKING:
    from opt_partition import Row  # imported lazily: the import takes 0.1 s

Shape: TypeAlias = tuple[int, ...]
Dims: TypeAlias = tuple[int | None, ...]


class Dimensions(NamedTuple):
    """The dimensions of a leaf.

    Attributes:
      dims: for each dimension that of the parameter, or `None`; `None` if unknown.
      is_derived: whether `init` was traced for them.
    """

    dims: Dims | None
    is_derived: bool = False


def dimensions(
    leaves: Sequence[Any],
    given: Sequence[Role],
    stated: Sequence[Dims | None],
    explained: Callable[[], Sequence[Row] | None],
) -> Iterator[Dimensions]:
    """Yields the dimensions of every leaf of a state; traces `init` only if some are not stated."""
    rows: Sequence[Row | None] = [None] * len(leaves)
    if any(r.param is not None and d is None for r, d in zip(given, stated, strict=True)):
        rows = explained() or rows
    for role, leaf, row, dims in zip(given, leaves, rows, stated, strict=True):
        if role.param is None:
            yield Dimensions((None,) * len(leaf.shape))
        elif dims is not None:
            yield Dimensions(dims)
        elif row is None or row.parameter not in (None, path_str(role.param)):
            yield Dimensions(None)
        else:
            yield Dimensions(row.dims, is_derived=True)


def followed(
    given: Sequence[Role], rows: Sequence[Row], starts: Mapping[int, int], params: Sequence[Names]
) -> list[Role]:
    """Returns roles in which entries of lists follow the parameters that `init` makes them of.

    Args:
      given: the roles by containers alone.
      rows: the provenance of each leaf in `init`.
      starts: for leaves that may be in such a list, the depth of the state they belong to.
      params: the paths of the parameters.
    """
    known = {path_str(param): param for param in params}
    owners = {i: known.get(rows[i].parameter or "") for i in starts}
    inside: dict[Any, dict[str, set[Names | None]]] = {}
    for i, role in enumerate(given):
        for k, (_, name) in enumerate(role.outer):
            entries = inside.setdefault(role.outer[:k], {})
            entries.setdefault(name, set()).add(owners.get(i, role.param))
    found = list(given)
    for i, start in starts.items():
        outer, owner = given[i].outer, owners[i]
        for k in range(start, len(outer)):
            entries = inside[outer[:k]]
            is_one_each = len(set().union(*entries.values())) == len(entries)
            if owner is not None and is_one_each and entries[outer[k][1]] == {owner}:
                found[i] = Role(outer[:k], owner, outer[k + 1 :])
                break
    return found


def explained(tx: Any, params: Any, leaves: Sequence[Any]) -> Sequence[Row] | None:
    """Returns the provenance of leaves in `init`; `None` if the state has grown since."""
    from opt_partition import explain

    numbers = jax.tree.map(lambda leaf: PartitionSpec(*map(str, range(len(leaf.shape)))), params)
    rows = explain(tx, params, numbers).rows
    return rows if [row.shape for row in rows] == [leaf.shape for leaf in leaves] else None


def shapes_of(params: Any) -> dict[Names, Shape]:
    """Returns the shape of every parameter by path."""
    return {path: leaf.shape for path, leaf in flatten_with_paths(params) if leaf is not None}


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
