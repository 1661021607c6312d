"""Gradients that are summed on every device, though each uses a part of the sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from opt_partition._verify.leaves import Leaf
from opt_partition._verify.moved import Moved
from opt_partition._verify.report import Finding, Severity


def gradient_all_reduces(
    moved: Sequence[Moved],
    mesh: Mapping[str, int],
    severity: Severity,
    of_vectors: Severity,
) -> Iterator[Finding]:
    """The all-reduces of gradients of which a device then uses its part."""
    for reduce in moved:
        if reduce.row.kind != "all-reduce" or reduce.size == 1 or not reduce.from_inputs:
            continue
        for leaf in reduce.reaches:
            if leaf.role == "other":
                continue
            ways = _ways(reduce, leaf, mesh)
            whole = leaf.shard_size * ways
            if ways > 1 and whole in (reduce.size, reduce.size * reduce.row.count):
                yield Finding(
                    "gradient all-reduce",
                    of_vectors if reduce.is_vector else severity,
                    leaf.path,
                    f"{reduce} sums a gradient on every device, of which {leaf.path} takes "
                    f"1/{ways}: a reduce-scatter would send half the bytes, now "
                    f"{reduce.row.total_bytes:,} a device and step",
                )
                break


def _ways(reduce: Moved, leaf: Leaf, mesh: Mapping[str, int]) -> int:
    """Over how many devices of a group `leaf` is divided."""
    if reduce.row.axes is None or leaf.mesh_axes is None:
        return reduce.row.group_size
    divided = {axis for axes in leaf.mesh_axes for axis in axes}
    return math.prod(mesh[axis] for axis in reduce.row.axes if axis in divided)
