"""Which dimensions of its parameter each leaf of a state keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from opt_core import Role, flatten_with_paths, path_str
from opt_partition import Row, explain


class Dimensions(NamedTuple):
    """The dimensions of a leaf.

    Attributes:
      dims: for each the parameter's, or `None`; `None` where that is not known.
      is_derived: whether `init` was traced for them.
    """

    dims: tuple[int | None, ...] | None
    is_derived: bool


def dimensions(
    tx: Any, params: Any, states: Any, given: Sequence[Role], *, is_plain: bool
) -> Iterator[Dimensions]:
    """Yields the dimensions of every leaf.

    Args:
      tx: the transformation.
      params: `jax.ShapeDtypeStruct`s.
      states: likewise.
      given: which parameter each leaf follows.
      is_plain: whether a leaf of its parameter's shape is known to keep all dimensions. Then
        nothing is traced where there are no others.
    """
    leaves = jax.tree.leaves(states)
    shapes = {path: leaf.shape for path, leaf in flatten_with_paths(params) if leaf is not None}
    mirrors = [
        role.param is None or leaf.shape in ((), shapes[role.param])
        for role, leaf in zip(given, leaves, strict=True)
    ]
    rows: Sequence[Row | None] = [None] * len(leaves)
    if not is_plain or not all(mirrors):
        rows = _explained(tx, params, states) or rows
    for role, leaf, row, is_mirror in zip(given, leaves, rows, mirrors, strict=True):
        shape = leaf.shape
        if role.param is None:
            yield Dimensions((None,) * len(shape), False)
        elif is_mirror and (is_plain or not shape):
            yield Dimensions(tuple(range(len(shape))), False)
        elif row is None or row.parameter not in (None, path_str(role.param)):
            yield Dimensions(None, False)
        else:
            yield Dimensions(row.dims, True)


def _explained(tx: Any, params: Any, states: Any) -> list[Row] | None:
    """What `init` shows; `None` where the state has grown since."""
    numbers = jax.tree.map(lambda leaf: PartitionSpec(*map(str, range(len(leaf.shape)))), params)
    rows = explain(tx, params, numbers).rows
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(states)]
    return rows if [row.shape for row in rows] == shapes else None
