"""A memory plan in print: on a screen, or all of it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from opt_partition._display import (
    byte_cells,
    collapse,
    dtype_name,
    format_table,
    human_bytes,
    join_entries,
    join_ints,
)
from opt_partition._specs import named_sizes

if TYPE_CHECKING:
    from opt_partition._plan import GroupBytes, MemoryPlan, PlanRow

_GROUPS: Final = 4
_WORST: Final = 3
_WIDTH: Final = 100
_TEXT: Final = ("", "memory", "field", "dtype", "group", "leaf", "shape", "spec", "reason")
_MUON: Final = (
    "Muon needs whole matrices of this state: `opt_matrix.muon(learning_rate, plan=...)` hands "
    "them out"
)


def plan_text(plan: MemoryPlan, *, everything: bool = False) -> str:
    """Returns what fits a screen: totals, the largest groups, the worst leaves; or `everything`."""
    totals = f"{plan_title(plan)}\n{_totals(plan)}"
    memories = plan.bytes_per_device_by_memory
    if len(memories) > 1:
        held = ", ".join(f"{kind} {human_bytes(count)}" for kind, count in memories.items())
        totals += f"\nby memory: {held}"
    parts = [totals]
    groups = alike_groups(plan)
    if everything:
        parts += [f"optimizer state by field\n{_fields(plan)}", _group_table(plan, groups)]
    else:
        rest = groups[_GROUPS:]
        parts.append(_group_table(plan, groups[:_GROUPS]))
        if rest:
            count = sum(len(names) for _, names, _ in rest)
            total = sum(len(names) * group.total for _, names, group in rest)
            parts[-1] += f"\n{count:,} more group{'s' * (count > 1)}: {human_bytes(total)}"
    if plan.replicated:
        parts.append(_replicated(plan) if everything else _worst(plan))
    if plan.zero and "MuonState.mu" in plan.state_fields:
        parts.append(_MUON)
    return "\n\n".join(parts)


def plan_title(plan: MemoryPlan) -> str:
    """Returns the mesh with its size, and what is sharded further over which axes."""
    title = f"mesh {named_sizes(plan.mesh, plan.mesh.axis_names)}: {plan.mesh.size:,} devices"
    if plan.zero:
        what = "state" if plan.zero_level == 1 else "state and gradients"
        title += f"; {what} extended over {', '.join(plan.zero)} (ZeRO-{plan.zero_level})"
    return title


def alike_groups(plan: MemoryPlan) -> list[tuple[str, list[str], GroupBytes]]:
    """Returns the groups, largest first: a pattern for those alike, their names, bytes of each."""
    alike = collapse(plan.groups.items(), lambda item: item[0], lambda item: item[1])
    groups = [(pattern, [name for name, _ in items], items[0][1]) for pattern, items in alike]
    return sorted(groups, key=lambda group: -len(group[1]) * group[2].total)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return format_table(head, rows, [name for name in head if name not in _TEXT])


def _totals(plan: MemoryPlan) -> str:
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
    return _table(("", "per device", "bytes per device", "whole", "bytes"), rows)


def _fields(plan: MemoryPlan) -> str:
    rows = []
    for field, device in plan.state_fields.items():
        leaves = [row.leaf for row in plan.rows if row.kind == "state" and row.field == field]
        dtypes = ", ".join(dict.fromkeys(dtype_name(leaf.dtype) for leaf in leaves))
        whole = human_bytes(sum(leaf.bytes for leaf in leaves))
        rows.append((field, f"{len(leaves):,}", dtypes, *byte_cells(device), whole))
    head = ("field", "leaves", "dtype", "per device", "bytes per device", "whole")
    return _table(head, rows)


def _group_table(plan: MemoryPlan, groups: Sequence[tuple[str, list[str], GroupBytes]]) -> str:
    kinds = ["params", "grads", "accumulators", "state"]
    if plan.accumulators is None:
        kinds.remove("accumulators")
    rows = []
    for pattern, names, group in groups:
        cells = [human_bytes(getattr(group, kind)) for kind in kinds]
        rows.append((pattern, f"{len(names):,}", *cells, *byte_cells(group.total)))
    head = ("group", "groups", *kinds, "total", "bytes")
    return "bytes per device of each group of parameters\n" + _table(head, rows)


def _wasteful(plan: MemoryPlan) -> list[tuple[str, list[PlanRow], int]]:
    """Returns leaves beyond an equal share, worst first: a pattern, those alike, their waste."""
    alike = collapse(
        plan.replicated,
        lambda row: f"{row.kind} {row.leaf.path}",
        lambda row: (
            row.leaf.shape,
            dtype_name(row.leaf.dtype),
            row.leaf.spec,
            row.leaf.memory_kind,
            row.waste,
            row.reason,
        ),
    )
    summed = [(pattern, rows, sum(row.waste for row in rows)) for pattern, rows in alike]
    return sorted(summed, key=lambda item: -item[2])


def _waste_title(plan: MemoryPlan) -> str:
    total = sum(row.waste for row in plan.replicated)
    return f"replicated: {human_bytes(total)} ({total:,} bytes) per device beyond an equal share"


def _worst(plan: MemoryPlan) -> str:
    ranked = _wasteful(plan)
    lines = [_waste_title(plan)]
    for pattern, rows, waste in ranked[:_WORST]:
        many = f" ({len(rows):,} leaves)" * (len(rows) > 1)
        line = f"{pattern}{many}: {human_bytes(waste)}, {rows[0].reason}"
        lines.append("  " + textwrap.shorten(line, _WIDTH - 2, placeholder=" ..."))
    if rest := sum(len(rows) for _, rows, _ in ranked[_WORST:]):
        lines.append(f"  {rest:,} more lea{'ves' if rest > 1 else 'f'}")
    return "\n".join(lines)


def _replicated(plan: MemoryPlan) -> str:
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
    head = ("leaf", "leaves", "shape", "spec", "waste", "bytes", "reason")
    return f"{_waste_title(plan)}\n{_table(head, rows)}"
