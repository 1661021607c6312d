"""A memory plan in print, on a screen or all of it, and as a picture."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from opt_partition._display import (
    byte_cells,
    collapse,
    dtype_name,
    format_table,
    human_bytes,
    unit_of,
)
from opt_partition._specs import named_sizes, spec_str

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from opt_partition._plan import GroupBytes, MemoryPlan, PlanRow

# The label of each kind, and its colour: mid tones, with a contrast of at least 3 to white and to a
# dark page's #14191f.
_KINDS: Final = {
    "params": ("parameters", "#3b7dbb"),
    "grads": ("gradients", "#b9770e"),
    "accumulators": ("accumulators", "#8e6fc9"),
    "state": ("optimizer state", "#2f9161"),
}
_WASTE: Final = "#d1495b"
_INK: Final = "#808080"
_MUON: Final = (
    "Muon needs whole matrices of this state: `opt_matrix.muon(learning_rate, plan=...)` hands "
    "them out"
)
_Group = tuple[str, list[str], "GroupBytes"]


def plan_text(plan: MemoryPlan, *, everything: bool = False) -> str:
    """Returns what fits a screen: totals, the largest groups, the worst leaves; or `everything`."""
    totals = f"{_title(plan)}\n{_totals(plan)}"
    memories = plan.bytes_per_device_by_memory
    if len(memories) > 1:
        held = ", ".join(f"{kind} {human_bytes(count)}" for kind, count in memories.items())
        totals += f"\nby memory: {held}"
    parts = [totals]
    groups = _alike_groups(plan)
    if everything:
        parts += [f"optimizer state by field\n{_fields(plan)}", _group_table(plan, groups)]
    else:
        shown, rest = groups[:4], groups[4:]
        parts.append(_group_table(plan, shown))
        if rest:
            count = sum(len(names) for _, names, _ in rest)
            total = sum(len(names) * group.total for _, names, group in rest)
            parts[-1] += f"\n{count:,} more group{'s' * (count > 1)}: {human_bytes(total)}"
    if plan.replicated:
        parts.append(_replicated(plan, everything=everything))
    if plan.zero and "MuonState.mu" in plan.state_fields:
        parts.append(_MUON)
    return "\n\n".join(parts)


def _title(plan: MemoryPlan) -> str:
    """Returns the mesh with its size, and what is sharded further over which axes."""
    title = f"mesh {named_sizes(plan.mesh, plan.mesh.axis_names)}: {plan.mesh.size:,} devices"
    if plan.zero:
        what = "state" if plan.zero_level == 1 else "state and gradients"
        title += f"; {what} extended over {', '.join(plan.zero)} (ZeRO-{plan.zero_level})"
    return title


def _kinds(plan: MemoryPlan) -> list[str]:
    """Returns the kinds of leaves in a plan."""
    return [kind for kind in _KINDS if getattr(plan, kind) is not None]


def _alike_groups(plan: MemoryPlan) -> list[_Group]:
    """Returns the groups, largest first: a pattern for those alike, their names, bytes of each."""
    alike = collapse(plan.groups.items(), lambda item: item[0], lambda item: item[1])
    groups = [(pattern, [name for name, _ in items], items[0][1]) for pattern, items in alike]
    return sorted(groups, key=lambda group: -len(group[1]) * group[2].total)


def _totals(plan: MemoryPlan) -> str:
    parts = [(_KINDS[kind][0], getattr(plan, kind)) for kind in _kinds(plan)]
    sizes = [(label, layout.bytes_per_device, layout.bytes) for label, layout in parts]
    sizes.append(("total", plan.total_bytes_per_device, plan.total_bytes))
    rows = [(label, *byte_cells(device), *byte_cells(whole)) for label, device, whole in sizes]
    if plan.temporary_bytes is not None:
        rows.append(("temporaries, at most", *byte_cells(plan.temporary_bytes), "", ""))
    return format_table(("", "per device", "bytes per device", "whole", "bytes"), rows)


def _fields(plan: MemoryPlan) -> str:
    rows = []
    for field, device in plan.state_fields.items():
        leaves = [row.leaf for row in plan.rows if row.kind == "state" and row.field == field]
        dtypes = ", ".join(dict.fromkeys(dtype_name(leaf.dtype) for leaf in leaves))
        whole = human_bytes(sum(leaf.bytes for leaf in leaves))
        rows.append((field, f"{len(leaves):,}", dtypes, *byte_cells(device), whole))
    head = ("field", "leaves", "dtype", "per device", "bytes per device", "whole")
    return format_table(head, rows)


def _group_table(plan: MemoryPlan, groups: Sequence[_Group]) -> str:
    kinds = _kinds(plan)
    rows = []
    for pattern, names, group in groups:
        cells = [human_bytes(getattr(group, kind)) for kind in kinds]
        rows.append((pattern, f"{len(names):,}", *cells, *byte_cells(group.total)))
    table = format_table(("group", "groups", *kinds, "total", "bytes"), rows)
    return f"bytes per device of each group of parameters\n{table}"


def _replicated(plan: MemoryPlan, *, everything: bool) -> str:
    """Returns the leaves beyond an equal share, worst first: three lines, or a table of all."""

    def same(row: PlanRow) -> Any:
        leaf = row.leaf
        return (leaf.shape, str(leaf.dtype), leaf.spec, leaf.memory_kind, row.waste, row.reason)

    alike = collapse(plan.replicated, lambda row: f"{row.kind} {row.leaf.path}", same)
    ranked = sorted(alike, key=lambda item: -len(item[1]) * item[1][0].waste)
    total = sum(row.waste for row in plan.replicated)
    title = f"replicated: {human_bytes(total)} ({total:,} bytes) per device beyond an equal share"
    if everything:
        cells = [
            (
                pattern,
                f"{len(rows):,}",
                str(rows[0].leaf.shape),
                spec_str(rows[0].leaf.spec),
                *byte_cells(len(rows) * rows[0].waste),
                rows[0].reason,
            )
            for pattern, rows in ranked
        ]
        head = ("leaf", "leaves", "shape", "spec", "waste", "bytes", "reason")
        return f"{title}\n{format_table(head, cells)}"
    lines = [title]
    for pattern, rows in ranked[:3]:
        many = f" ({len(rows):,} leaves)" * (len(rows) > 1)
        waste = human_bytes(len(rows) * rows[0].waste)
        line = f"{pattern}{many}: {waste}, {rows[0].reason}"
        lines.append("  " + textwrap.shorten(line, 98, placeholder=" ..."))
    if rest := sum(len(rows) for _, rows in ranked[3:]):
        lines.append(f"  {rest:,} more lea{'ves' if rest > 1 else 'f'}")
    return "\n".join(lines)


def plot_plan(plan: MemoryPlan) -> Figure:
    """Draws a plan; see `MemoryPlan.plot`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "a picture of a plan needs matplotlib: `python -m pip install 'opt-partition[plot]'`"
        ) from None
    bars = _bars(plan)
    scale, unit = unit_of(max((sum(sizes.values()) for _, sizes, _ in bars), default=0))
    figure = Figure(figsize=(8, 1.3 + 0.5 * len(bars)), layout="constrained")
    figure.patch.set_alpha(0)
    axes: Any = figure.add_subplot(facecolor="none")
    ends = [0.0] * len(bars)
    for kind in _kinds(plan):
        label, colour = _KINDS[kind]
        widths = [sizes[kind] / scale for _, sizes, _ in bars]
        axes.barh(range(len(bars)), widths, 0.45, ends, color=colour, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    below = [place + 0.32 for place in range(len(bars))]
    widths = [waste / scale for _, _, waste in bars]
    axes.barh(below, widths, 0.12, color=_WASTE, label="waste: beyond an equal share")
    for place, (end, (_, sizes, _)) in enumerate(zip(ends, bars, strict=True)):
        total = human_bytes(sum(sizes.values()))
        axes.text(end, place, f" {total}", va="center", color=_INK, fontsize=9)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"{unit} per device", color=_INK)
    axes.set_title(_title(plan), color=_INK, fontsize=10, loc="left")
    axes.tick_params(colors=_INK)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=_INK)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, labelcolor=_INK, fontsize=9)
    return figure


def _bars(plan: MemoryPlan) -> list[tuple[str, dict[str, int], int]]:
    """Returns label, bytes of each kind and waste of the 12 largest bars, and of the rest."""
    wasted: Counter[str] = Counter()
    for row in plan.rows:
        wasted[row.group] += row.waste
    bars = [
        (
            f"{pattern} ({len(names)})" if len(names) > 1 else pattern,
            {kind: len(names) * getattr(group, kind) for kind in _KINDS},
            sum(wasted[name] for name in names),
        )
        for pattern, names, group in _alike_groups(plan)
    ]
    if rest := bars[12:]:
        sizes = {kind: sum(sizes[kind] for _, sizes, _ in rest) for kind in _KINDS}
        bars[12:] = [(f"{len(rest):,} more", sizes, sum(waste for _, _, waste in rest))]
    return bars
