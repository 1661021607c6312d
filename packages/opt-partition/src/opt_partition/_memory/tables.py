"""The tables of a memory plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

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
    from opt_partition._memory.plan import MemoryPlan, PlanRow

_MOST_WASTEFUL = 12


def plan_tables(plan: MemoryPlan) -> list[Table]:
    """Returns the tables of a plan: totals, memory kinds, fields, groups, replicated leaves."""
    tables = [_totals(plan)]
    if len(plan.bytes_per_device_by_memory) > 1:
        tables.append(_memories(plan))
    tables += [_fields(plan), _groups(plan)]
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


def _groups(plan: MemoryPlan) -> Table:
    alike = collapse(plan.groups.items(), lambda item: item[0], lambda item: item[1])
    kinds = ["params", "grads", "accumulators", "state"]
    if plan.accumulators is None:
        kinds.remove("accumulators")
    rows = []
    for pattern, items in alike:
        _, group = items[0]
        cells = [human_bytes(getattr(group, kind)) for kind in kinds]
        rows.append((pattern, f"{len(items):,}", *cells, *byte_cells(group.total)))
    return Table(
        "bytes per device of each group of parameters",
        ("group", "groups", *kinds, "total", "bytes"),
        tuple(rows),
        frozenset({"groups", *kinds, "total", "bytes"}),
    )


def _replicated(plan: MemoryPlan) -> Table:
    ranked = sorted(
        collapse(plan.replicated, _path, lambda row: (_what(row), row.waste, row.reason)),
        key=lambda item: -sum(row.waste for row in item[1]),
    )
    shown = list(_wasteful(ranked[:_MOST_WASTEFUL]))
    rest = [row for _, rows in ranked[_MOST_WASTEFUL:] for row in rows]
    if rest:
        device, count = byte_cells(sum(row.waste for row in rest))
        shown.append((f"{len(rest):,} more leaves", "", "", "", device, count, ""))
    total = sum(row.waste for row in plan.replicated)
    return Table(
        f"replicated: {human_bytes(total)} ({total:,} bytes) per device beyond an equal share",
        ("leaf", "leaves", "shape", "spec", "waste", "bytes", "reason"),
        tuple(shown),
        frozenset({"leaves", "waste", "bytes"}),
    )


def _wasteful(ranked: Iterable[tuple[str, list[PlanRow]]]) -> Iterator[tuple[str, ...]]:
    for pattern, rows in ranked:
        leaf = rows[0].leaf
        waste = byte_cells(sum(row.waste for row in rows))
        shape, spec = join_ints(leaf.shape), join_entries(leaf.spec)
        yield (pattern, f"{len(rows):,}", shape, spec, *waste, rows[0].reason)


def _path(row: PlanRow) -> str:
    return f"{row.kind} {row.leaf.path}"


def _what(row: PlanRow) -> tuple[object, ...]:
    leaf = row.leaf
    return leaf.shape, dtype_name(leaf.dtype), leaf.spec, leaf.memory_kind
