"""Muon's plans for decoders of 1, 7 and 70 billion parameters and for one of 256 experts.

    hatch run dev:python tests-integration/matrix_plans.py

prints the table of `docs/performance.md`: all defaults, on meshes without devices.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from opt_matrix import Group, Matrices, MatrixPlan, plan_matrices

Axes = dict[str, tuple[str, ...]]
DENSE: Axes = {
    "q": ("layers", "embed", "heads", "kv"),
    "k": ("layers", "embed", "kv_heads", "kv"),
    "v": ("layers", "embed", "kv_heads", "kv"),
    "o": ("layers", "heads", "kv", "embed"),
}
FEED_FORWARD: Axes = {
    "gate": ("layers", "embed", "mlp"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
}
EXPERTS: Axes = {name: ("layers", "expert", *axes[1:]) for name, axes in FEED_FORWARD.items()}
DECODERS: dict[str, tuple[Axes, dict[str, int]]] = {
    "1B": (
        DENSE | FEED_FORWARD,
        {"layers": 16, "embed": 2048, "heads": 32, "kv_heads": 8, "kv": 64, "mlp": 8192},
    ),
    "7B": (
        DENSE | FEED_FORWARD,
        {"layers": 32, "embed": 4096, "heads": 32, "kv_heads": 32, "kv": 128, "mlp": 11008},
    ),
    "70B": (
        DENSE | FEED_FORWARD,
        {"layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "kv": 128, "mlp": 28672},
    ),
    "256 experts": (
        DENSE | EXPERTS,
        {"layers": 48, "embed": 4096, "heads": 64, "kv_heads": 8, "kv": 128}
        | {"expert": 256, "mlp": 1536},
    ),
}
# What the dimensions lie over; without a mesh axis of that name they lie over none.
DENSE_RULES = {"embed": ("fsdp", "expert"), "heads": "tp", "kv_heads": "tp", "mlp": "tp"}
EXPERT_RULES = {"expert": "expert", "embed": "fsdp", "mlp": "tp"}
MESHES: dict[str, dict[str, int]] = {
    "fsdp=8": {"fsdp": 8},
    "fsdp=64": {"fsdp": 64},
    "fsdp=512": {"fsdp": 512},
    "fsdp=64, tp=8": {"fsdp": 64, "tp": 8},
    "expert=64": {"expert": 64},
    "fsdp=8, expert=64": {"fsdp": 8, "expert": 64},
}
CASES = [
    (decoder, mesh)
    for decoder in DECODERS
    for mesh in MESHES
    if "expert" in DECODERS[decoder][1] or "expert" not in MESHES[mesh]
]


def plan_of(decoder: str, mesh: str, **options: Any) -> MatrixPlan:
    """Returns the plan for the scanned layers of a decoder."""
    leaves, sizes = DECODERS[decoder]
    axes_of = MESHES[mesh]

    def entry(leaf: tuple[str, ...], name: str) -> Any:
        found = (EXPERT_RULES if "expert" in leaf else DENSE_RULES).get(name, ())
        names = (found,) if isinstance(found, str) else found
        return tuple(axis for axis in names if axis in axes_of) or None

    return plan_matrices(
        {
            n: jax.ShapeDtypeStruct([sizes[a] for a in leaf], "float32")
            for n, leaf in leaves.items()
        },
        {n: P(*(entry(leaf, a) for a in leaf)) for n, leaf in leaves.items()},
        AbstractMesh(tuple(axes_of.values()), tuple(axes_of)),
        Matrices.by_logical_axes({n: P(*leaf) for n, leaf in leaves.items()}),
        **options,
    )


def share_of(plan: MatrixPlan, group: Group) -> float:
    """Returns the bytes of a group's matrices that a device holds, in what they are sent in."""
    cut = math.prod(plan.mesh_shape[axis] for axis in group.kind.matrix_axes)
    return group.count * math.prod(group.shape) / cut * np.dtype(group.kind.dtype).itemsize


HEAD = (
    *("matrices", "mesh", "groups", "collectives", "GiB moved", "moved / own share"),
    *("FLOP / ideal", "GiB of temporaries"),
)


def row(decoder: str, mesh: str) -> tuple[str, ...]:
    """Returns a row of the table."""
    plan = plan_of(decoder, mesh)
    share = sum(share_of(plan, group) for group in plan.groups)
    ideal = sum(group.ideal_flops for group in plan.groups)
    counts = len(plan.groups), sum(group.collectives for group in plan.groups)
    return (
        *(decoder, mesh, *map(str, counts), f"{plan.bytes_per_device / 2**30:.2f}"),
        *(f"{plan.bytes_per_device / share:.1f}", f"{plan.flops_per_device / ideal:.1f}"),
        f"{plan.temp_bytes / 2**30:.2f}",
    )


def table() -> str:
    """Returns the table in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *(row(*case) for case in CASES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(table())
