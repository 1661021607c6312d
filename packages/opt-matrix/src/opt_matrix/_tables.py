"""A plan as JSON, and as a table for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opt_matrix._plan import Group, MatrixPlan

_FIGURES = (
    "padding",
    "collectives",
    "bytes_per_device",
    "flops_per_device",
    "ideal_flops",
    "temp_bytes",
)
_HEAD = (
    "leaves",
    "groups",
    "each of matrices",
    "choice",
    "axes",
    "padding",
    "collectives",
    "bytes",
    "FLOP",
    "of ideal",
    "temporaries",
)


def as_json(plan: MatrixPlan) -> str:
    """See `MatrixPlan.to_json`."""
    groups = [
        {
            "leaves": list(group.leaves),
            "parts": [list(part) for part in group.parts],
            "shape": list(group.shape),
            "count": group.count,
            "dtype": group.kind.dtype,
            "choice": group.choice,
            **{name: list(axes) for name, axes in dataclasses.asdict(group.way).items()},
            **{name: getattr(group, name) for name in _FIGURES},
        }
        for group in plan.groups
    ]
    return json.dumps(
        {
            "mesh": plan.mesh_shape,
            "max_group_bytes": plan.max_group_bytes,
            "min_group_bytes": plan.min_group_bytes,
            "groups": groups,
            "rest": list(plan.rest),
        },
        indent=2,
    )


def as_text(plan: MatrixPlan) -> str:
    """Returns a row for each group between a line on all leaves and one on all groups."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh_shape.items())
    rows = [_HEAD, *_rows(plan.groups)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    ideal = sum(group.ideal_flops for group in plan.groups) or 1.0
    above = (
        f"matrices on a mesh of {mesh}: {len(plan.layouts)} leaves, {len(plan.groups)} groups, "
        f"{len(plan.rest)} leaves are rest"
    )
    below = (
        f"each device: {_bytes(plan.bytes_per_device)} in "
        f"{sum(group.collectives for group in plan.groups)} collectives, "
        f"{plan.flops_per_device:.3g} FLOP "
        f"({plan.flops_per_device / ideal:.2f} of the ideal), "
        f"{_bytes(plan.temp_bytes)} of temporaries at most"
    )
    if plan.min_group_bytes > plan.max_group_bytes:
        below += (
            f"; `max_group_bytes` asks for {_bytes(plan.max_group_bytes)}, and the smallest bound "
            f"that can be met is {_bytes(plan.min_group_bytes)}"
        )
    return "\n".join([above, *lines, below])


def _rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    """A row for each group; one for all that differ in nothing but the leaves."""
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        alike.setdefault(_figures(group), []).append(group)
    rows = []
    for figures, found in alike.items():
        paths = list(dict.fromkeys(path for group in found for path in group.leaves))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        rows.append((f"{paths[0]}{more}", str(len(found)), *figures))
    return rows


def _figures(group: Group) -> tuple[str, ...]:
    rows, columns = group.shape
    ways = dataclasses.asdict(group.way)
    held = f"{group.count} x [{rows}, {columns}] {group.kind.dtype}"
    if group.kind.batch_axes:
        held += f" on each of {','.join(group.kind.batch_axes)}"
    return (
        held,
        group.choice,
        "; ".join(f"{do} {','.join(axes)}" for do, axes in ways.items() if axes) or "-",
        f"{group.padding / (group.count + group.padding):.0%}",
        str(group.collectives),
        _bytes(group.bytes_per_device),
        f"{group.flops_per_device:.3g}",
        f"{group.flops_per_device / group.ideal_flops:.2f}",
        _bytes(group.temp_bytes),
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"
