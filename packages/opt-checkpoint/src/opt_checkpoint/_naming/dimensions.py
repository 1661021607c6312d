"""Which dimensions of its parameter each leaf of a factored state has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from opt_core import Optimizer, flatten_with_paths, roles
from opt_core.protocols import DerivesLogicalAxes

from opt_checkpoint._naming.schema import DIMENSIONS, leaf_name


def dimensions(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    """Yields what has fewer dimensions than its parameter, or others, as settings.

    Two factors of a square matrix look the same: which one is averaged over rows only the
    definition knows, and says when it derives logical axes.

    Args:
      optimizer: of one definition; its leaves may be abstract. Of one that derives no axes nothing.
    """
    definition = optimizer.optimizer_def
    if not isinstance(definition, DerivesLogicalAxes):
        return
    numbers = jax.tree.map(_numbers, optimizer.target)
    derived = definition.derive_logical_axes(optimizer, numbers).state.param_states
    axes = jax.tree.leaves(derived, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))
    states = optimizer.state.param_states
    given = roles(optimizer.target, states, whole_tree=definition.whole_tree)
    ranks = dict(_ranks(optimizer.target))
    for role, spec in zip(given, axes, strict=True):
        if spec is None or role.param is None:
            continue
        if tuple(spec) != tuple(_numbered(ranks[role.param])):
            fields = [name for _, name in (*role.outer, *role.inner)]
            path = leaf_name((*fields, *role.param))
            yield f"{DIMENSIONS}{path}", ",".join("-" if axis is None else axis for axis in spec)


def _numbers(leaf: Any) -> PartitionSpec:
    return PartitionSpec(*_numbered(np.ndim(leaf)))


def _numbered(rank: int) -> list[str]:
    return [str(i) for i in range(rank)]


def _ranks(params: Any) -> Iterator[tuple[tuple[str, ...], int]]:
    for names, leaf in flatten_with_paths(params):
        if leaf is not None:
            yield names, np.ndim(leaf)
