"""Detection of gradients that are all-reduced although each device uses only a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from opt_partition._mesh.specs import itemsize
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.moved import Moved
from opt_partition._verify.report import Finding, Severity

# XLA for TPUs all-reduces anything smaller, whatever the program says, since it takes fewer rounds.
# Measured on v5e with libtpu 0.0.42: 16 KiB were all-reduced, 64 KiB were not.
SMALL = 64 * 1024


def gradient_all_reduces(
    moved: Sequence[Moved],
    mesh: Mapping[str, int],
    severity: Severity,
    of_small: Severity,
) -> Iterator[Finding]:
    """Yields the all-reduces of gradients of which each device uses only a part.

    Args:
      moved: the arrays communicated by collectives.
      mesh: size of each mesh axis.
      severity: severity for matrices.
      of_small: severity for vectors, or less than `SMALL` bytes.
    """
    for reduce in moved:
        if reduce.row.kind != "all-reduce" or reduce.size == 1 or not reduce.from_inputs:
            continue
        for leaf in reduce.reaches:
            if leaf.role == "other":
                continue
            ways = _ways(reduce, leaf, mesh)
            whole = leaf.shard_size * ways
            bytes_summed = reduce.size * itemsize(leaf.dtype)
            if ways > 1 and whole in (reduce.size * count for count in reduce.counts):
                yield Finding(
                    "gradient all-reduce",
                    of_small if reduce.is_vector or bytes_summed < SMALL else severity,
                    leaf.path,
                    f"{reduce} all-reduces a gradient of which {leaf.path} uses only 1/{ways} per "
                    "device: a reduce-scatter would send half of these "
                    f"{reduce.row.bytes * reduce.count:,} bytes per device and step",
                )
                break


def _ways(reduce: Moved, leaf: Leaf, mesh: Mapping[str, int]) -> int:
    """Returns the number of devices of a group that `leaf` is sharded over."""
    if reduce.row.axes is None or leaf.mesh_axes is None:
        return reduce.row.group_size
    divided = {axis for axes in leaf.mesh_axes for axis in axes}
    return math.prod(mesh[axis] for axis in reduce.row.axes if axis in divided)
