"""What placeholders do not show: leaves of flattened parameters, and the dimensions of leaves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec
from opt_core.extend import StateLeaf, around, path_str

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


def traced_places(
    leaves: Sequence[tuple[StateLeaf, int]],
    unclear: Collection[int],
    rows: Sequence[Row],
    params: Sequence[Names],
) -> dict[Names, tuple[Names, Names]]:
    """Returns the places of parameters that tracing shows; see `opt_core.extend.leaves_of`.

    Args:
      leaves: the leaves of the state, and the lengths of the paths of their transformations.
      unclear: the numbers of those to look at.
      rows: what `init` made each leaf of.
      params: the paths of the parameters.
    """
    by_name = {path_str(path): path for path in params}
    owners = [
        by_name.get(row.parameter or "") if i in unclear else leaf.parameter
        for i, ((leaf, _), row) in enumerate(zip(leaves, rows, strict=True))
    ]
    entries = _entries(leaves, owners)
    places = {}
    for i in unclear:
        path, owner = leaves[i][0].path, owners[i]
        if owner is None:
            continue
        named = [k for k in range(len(path)) if owner and path[k : k + len(owner)] == owner]
        entry = [k for k in range(len(path)) if path[:k] in entries]
        if named:
            places[path[: named[0] + len(owner)]] = owner, path[: named[0]]
        elif entry:
            places[path[: entry[0] + 1]] = owner, path[: entry[0]]
        elif rows[i].source == "provenance":  # by sizes alone it may be one of several
            places[path] = owner, around(path, owner)
    return places


def _entries(leaves: Sequence[tuple[StateLeaf, int]], owners: Sequence[Names | None]) -> set[Names]:
    """The paths of lists and dicts that have one entry for each of some parameters."""
    inside: dict[Names, dict[str, set[Names]]] = {}
    lists: set[Names] = set()
    for (leaf, start), owner in zip(leaves, owners, strict=True):
        path, kinds = leaf.path, leaf.kinds
        for k in range(start, len(path)):
            if kinds[k] in (tuple, list, dict):
                entry = inside.setdefault(path[:k], {}).setdefault(path[k], set())
                entry |= set() if owner is None else {owner}
            if kinds[k] in (tuple, list):
                lists.add(path[:k])
    return {
        path
        for path, entries in inside.items()
        if all(len(each) == 1 for each in entries.values())
        and len(set().union(*entries.values())) == len(entries)
        and (len(entries) > 1 or path in lists)
    }


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
