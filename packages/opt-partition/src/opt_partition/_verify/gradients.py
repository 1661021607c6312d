"""Gradients that are summed on every device, though each uses a part of the sum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from opt_partition._mesh.specs import itemsize
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.moved import Moved
from opt_partition._verify.report import Finding, Severity

# XLA for TPUs sums less than this whole, whatever the program says: it takes fewer rounds. Measured
# for v5e with libtpu 0.0.42; 16 KiB were summed whole, 64 KiB were not.
SMALL = 64 * 1024


def gradient_all_reduces(
    moved: Sequence[Moved],
    mesh: Mapping[str, int],
    severity: Severity,
    of_small: Severity,
) -> Iterator[Finding]:
    """The all-reduces of gradients of which a device then uses its part.

    Args:
      moved: what the collectives move.
      mesh: size of each mesh axis.
      severity: of a matrix.
      of_small: of a vector, or of less than `SMALL` bytes.
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
                    f"{reduce} sums a gradient on every device, of which {leaf.path} takes "
                    f"1/{ways}: a reduce-scatter would send half the bytes, now "
                    f"{reduce.row.bytes * reduce.count:,} a device and step",
                )
                break


def _ways(reduce: Moved, leaf: Leaf, mesh: Mapping[str, int]) -> int:
    """Over how many devices of a group `leaf` is divided."""
    if reduce.row.axes is None or leaf.mesh_axes is None:
        return reduce.row.group_size
    divided = {axis for axes in leaf.mesh_axes for axis in axes}
    return math.prod(mesh[axis] for axis in reduce.row.axes if axis in divided)
