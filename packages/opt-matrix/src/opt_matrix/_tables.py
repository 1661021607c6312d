"""A plan as a table for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opt_matrix._plan import Group, MatrixPlan


def as_text(plan: MatrixPlan) -> str:
    """Returns a row for each group between a line on all leaves and one on all groups."""
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh_shape.items())
    rows = [("leaves", "groups", *_COLUMNS), *_rows(plan.groups)]
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
        cells = tuple(cell(group) for cell in _COLUMNS.values())
        alike.setdefault(cells, []).append(group)
    rows = []
    for cells, members in alike.items():
        paths = list(dict.fromkeys(path for group in members for path in group.leaves))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        rows.append((f"{paths[0]}{more}", str(len(members)), *cells))
    return rows


def _matrices(group: Group) -> str:
    rows, columns = group.shape
    each = f" on each of {','.join(group.kind.batch_axes)}" if group.kind.batch_axes else ""
    return f"{group.count} x [{rows}, {columns}] {group.kind.dtype}{each}"


def _axes(group: Group) -> str:
    ways = dataclasses.asdict(group.way)
    return "; ".join(f"{do} {','.join(axes)}" for do, axes in ways.items() if axes) or "-"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


_COLUMNS: dict[str, Callable[[Group], str]] = {
    "each of matrices": _matrices,
    "choice": lambda group: group.choice,
    "axes": _axes,
    "padding": lambda group: f"{group.padding / (group.count + group.padding):.0%}",
    "collectives": lambda group: str(group.collectives),
    "bytes": lambda group: _bytes(group.bytes_per_device),
    "FLOP": lambda group: f"{group.flops_per_device:.3g}",
    "of ideal": lambda group: f"{group.flops_per_device / group.ideal_flops:.2f}",
    "temporaries": lambda group: _bytes(group.temp_bytes),
}
