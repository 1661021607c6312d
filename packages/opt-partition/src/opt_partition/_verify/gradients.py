"""Detection of gradients that every device receives in full although it uses only a part."""

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
    """Yields the all-reduces and gathers of gradients of which each device uses only a part.

    A gather of whole gradients, one of each device, which are then summed on the device, brings
    more to it than an all-reduce.

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
            ways = 1 if leaf.role == "other" else _ways(reduce, leaf, mesh)
            if ways > 1 and _makes_up(leaf.shard_size * ways, reduce.size, reduce):
                yield _finding(reduce, leaf, ways, "all-reduces", severity, of_small)
                break
    for leaf, gathers in _gathers(moved).items():
        ways = _ways(gathers[0], leaf, mesh)
        size = sum(math.prod(gather.row.operand_shape) for gather in gathers)
        if ways > 1 and _makes_up(leaf.shard_size * ways, size, gathers[0]):
            yield _finding(gathers[0], leaf, ways, "gathers the summands of", severity, of_small)


def _makes_up(whole: int, size: int, moved: Moved) -> bool:
    """Whether so many elements are a whole gradient, in one or all iterations of the loops."""
    return whole in (size * count for count in moved.counts)


def _gathers(moved: Sequence[Moved]) -> dict[Leaf, list[Moved]]:
    """Returns the gathers of gradients whose result, or its sums on a device, end in a leaf.

    Only those in the loops that the first of them is in: they add up in each iteration.
    """
    found: dict[Leaf, list[Moved]] = {}
    for gather in moved:
        if gather.row.kind == "all-gather" and gather.from_inputs and not gather.directly:
            for leaf in gather.adds_to:
                if leaf.role != "other":
                    found.setdefault(leaf, []).append(gather)
    return {
        leaf: [gather for gather in gathers if gather.site.loops == gathers[0].site.loops]
        for leaf, gathers in found.items()
    }


def _finding(
    moved: Moved, leaf: Leaf, ways: int, does: str, severity: Severity, of_small: Severity
) -> Finding:
    reduces = moved.row.kind == "all-reduce"
    size = math.prod(moved.row.operand_shape) * itemsize(leaf.dtype)
    small = size < SMALL or (reduces and moved.is_vector)
    sent = moved.row.bytes * moved.count
    times = "half" if reduces else f"1/{moved.row.group_size}"
    return Finding(
        "gradient all-reduce",
        of_small if small else severity,
        leaf.path,
        f"{moved} {does} a gradient of which {leaf.path} uses only 1/{ways} per device: a "
        f"reduce-scatter would send {times} of these {sent:,} bytes per device and step",
    )


def _ways(reduce: Moved, leaf: Leaf, mesh: Mapping[str, int]) -> int:
    """Returns the number of devices of a group that `leaf` is sharded over."""
    if reduce.row.axes is None or leaf.mesh_axes is None:
        return reduce.row.group_size
    divided = {axis for axes in leaf.mesh_axes for axis in axes}
    return math.prod(mesh[axis] for axis in reduce.row.axes if axis in divided)
