"""A memory plan in print: on a screen, or all of it as tables."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from opt_partition._display import (
    Table,
    byte_cells,
    collapse,
    dtype_name,
    human_bytes,
    join_entries,
    join_ints,
)
from opt_partition._mesh.specs import named_sizes

if TYPE_CHECKING:
    from opt_partition._memory.plan import GroupBytes, MemoryPlan, PlanRow

_GROUPS: Final = 4
_WORST: Final = 3
_WIDTH: Final = 100
_MUON: Final = (
    "Muon needs whole matrices of this state: `opt_matrix.muon(learning_rate, plan=...)` hands "
    "them out"
)


def plan_text(plan: MemoryPlan) -> str:
    """Returns what fits a screen: totals, the largest groups, the three worst leaves."""
    groups = sorted(_groups(plan), key=lambda group: -group[1] * group[2].total)
    shown, rest = groups[:_GROUPS], groups[_GROUPS:]
    table = _group_table(plan, shown)
    parts = [[plan_title(plan), *_totals(plan).lines()], [table.title, *table.lines()]]
    if rest:
        count, total = (sum(n for _, n, _ in rest), sum(n * group.total for _, n, group in rest))
        parts[-1].append(f"{count:,} more group{'s' * (count > 1)}: {human_bytes(total)}")
    if len(memories := plan.bytes_per_device_by_memory) > 1:
        held = ", ".join(f"{kind} {human_bytes(count)}" for kind, count in memories.items())
        parts[0].append(f"by memory: {held}")
    if plan.replicated:
        parts.append(_worst(plan))
    if plan.zero and "MuonState.mu" in plan.state_fields:
        parts.append([_MUON])
    return "\n\n".join("\n".join(lines) for lines in parts)


def plan_tables(plan: MemoryPlan) -> list[Table]:
    """Returns all tables of a plan: totals, memory kinds, fields, groups, replicated leaves."""
    tables = [_totals(plan)]
    if len(plan.bytes_per_device_by_memory) > 1:
        tables.append(_memories(plan))
    tables += [_fields(plan), _group_table(plan, _groups(plan))]
    if plan.replicated:
        tables.append(_replicated(plan))
    return tables


def plan_title(plan: MemoryPlan) -> str:
    """Returns the title of a plan.

    Contains the mesh with its size, and what is sharded further over which axes.
    """
    title = f"mesh {named_sizes(plan.mesh, plan.mesh.axis_names)}: {plan.mesh.size:,} devices"
    if plan.zero:
        what = "state" if plan.zero_level == 1 else "state and gradients"
        title += f"; {what} extended over {', '.join(plan.zero)} (ZeRO-{plan.zero_level})"
    return title


def _totals(plan: MemoryPlan) -> Table:
    parts = {
        "parameters": (plan.param_bytes_per_device, plan.param_bytes),
        "gradients": (plan.grad_bytes_per_device, plan.grad_bytes),
        "accumulators": (plan.accumulator_bytes_per_device, plan.accumulator_bytes),
        "optimizer state": (plan.state_bytes_per_device, plan.state_bytes),
        "total": (plan.total_bytes_per_device, plan.total_bytes),
    }
    if plan.accumulators is None:
        del parts["accumulators"]
    rows = [
        (name, *byte_cells(device), *byte_cells(whole)) for name, (device, whole) in parts.items()
    ]
    if plan.temporary_bytes is not None:
        rows.append(("temporaries, at most", *byte_cells(plan.temporary_bytes), "", ""))
    return Table(
        plan_title(plan),
        ("", "per device", "bytes per device", "whole", "bytes"),
        tuple(rows),
        frozenset({"per device", "bytes per device", "whole", "bytes"}),
    )


def _memories(plan: MemoryPlan) -> Table:
    return Table(
        "by memory",
        ("memory", "per device", "bytes per device"),
        tuple(
            (kind, *byte_cells(count)) for kind, count in plan.bytes_per_device_by_memory.items()
        ),
        frozenset({"per device", "bytes per device"}),
    )


def _fields(plan: MemoryPlan) -> Table:
    rows = []
    for field, device in plan.state_fields.items():
        leaves = [row.leaf for row in plan.rows if row.kind == "state" and row.field == field]
        dtypes = ", ".join(dict.fromkeys(dtype_name(leaf.dtype) for leaf in leaves))
        whole = human_bytes(sum(leaf.bytes for leaf in leaves))
        rows.append((field, f"{len(leaves):,}", dtypes, *byte_cells(device), whole))
    return Table(
        "optimizer state by field",
        ("field", "leaves", "dtype", "per device", "bytes per device", "whole"),
        tuple(rows),
        frozenset({"leaves", "per device", "bytes per device", "whole"}),
    )


def _groups(plan: MemoryPlan) -> list[tuple[str, int, GroupBytes]]:
    """Returns the groups: a pattern for those that are alike, their number, bytes of each."""
    alike = collapse(plan.groups.items(), lambda item: item[0], lambda item: item[1])
    return [(pattern, len(items), items[0][1]) for pattern, items in alike]


def _group_table(plan: MemoryPlan, groups: list[tuple[str, int, GroupBytes]]) -> Table:
    kinds = ["params", "grads", "accumulators", "state"]
    if plan.accumulators is None:
        kinds.remove("accumulators")
    rows = []
    for pattern, count, group in groups:
        cells = [human_bytes(getattr(group, kind)) for kind in kinds]
        rows.append((pattern, f"{count:,}", *cells, *byte_cells(group.total)))
    return Table(
        "bytes per device of each group of parameters",
        ("group", "groups", *kinds, "total", "bytes"),
        tuple(rows),
        frozenset({"groups", *kinds, "total", "bytes"}),
    )


def _wasteful(plan: MemoryPlan) -> list[tuple[str, list[PlanRow], int]]:
    """Returns leaves beyond an equal share, worst first: a pattern, those alike, their waste."""
    alike = collapse(plan.replicated, _path, lambda row: (_what(row), row.waste, row.reason))
    summed = [(pattern, rows, sum(row.waste for row in rows)) for pattern, rows in alike]
    return sorted(summed, key=lambda item: -item[2])


def _waste_title(plan: MemoryPlan) -> str:
    total = sum(row.waste for row in plan.replicated)
    return f"replicated: {human_bytes(total)} ({total:,} bytes) per device beyond an equal share"


def _worst(plan: MemoryPlan) -> list[str]:
    ranked = _wasteful(plan)
    lines = [_waste_title(plan)]
    for pattern, rows, waste in ranked[:_WORST]:
        many = f" ({len(rows):,} leaves)" * (len(rows) > 1)
        line = f"{pattern}{many}: {human_bytes(waste)}, {rows[0].reason}"
        lines.append("  " + textwrap.shorten(line, _WIDTH - 2, placeholder=" ..."))
    rest = sum(len(rows) for _, rows, _ in ranked[_WORST:])
    return [*lines, f"  {rest:,} more lea{'ves' if rest > 1 else 'f'}"] if rest else lines


def _replicated(plan: MemoryPlan) -> Table:
    rows = [
        (
            pattern,
            f"{len(alike):,}",
            join_ints(alike[0].leaf.shape),
            join_entries(alike[0].leaf.spec),
            *byte_cells(waste),
            alike[0].reason,
        )
        for pattern, alike, waste in _wasteful(plan)
    ]
    return Table(
        _waste_title(plan),
        ("leaf", "leaves", "shape", "spec", "waste", "bytes", "reason"),
        tuple(rows),
        frozenset({"leaves", "waste", "bytes"}),
    )


def _path(row: PlanRow) -> str:
    return f"{row.kind} {row.leaf.path}"


def _what(row: PlanRow) -> tuple[object, ...]:
    leaf = row.leaf
    return leaf.shape, dtype_name(leaf.dtype), leaf.spec, leaf.memory_kind
