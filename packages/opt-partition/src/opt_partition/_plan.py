"""The data of a memory plan; in print, on a screen or all of it, and as a picture."""

from __future__ import annotations

import dataclasses
import functools
import json
import textwrap
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal

from opt_partition._display import (
    byte_cells,
    collapse,
    dtype_name,
    format_table,
    human_bytes,
    plain,
    unit_of,
)
from opt_partition._explain import Explanation
from opt_partition._layout import AnyMesh, Layout, LeafLayout, named_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["params", "grads", "accumulators", "state"]
NO_PARAMETER = "(no parameter)"
# Label and colour, with a contrast of at least 3 to white and to a dark page's #14191f.
KINDS: Final[dict[Kind, tuple[str, str]]] = {
    "params": ("parameters", "#3b7dbb"),
    "grads": ("gradients", "#b9770e"),
    "accumulators": ("accumulators", "#8e6fc9"),
    "state": ("optimizer state", "#2f9161"),
}
_WASTE: Final = "#d1495b"
_INK: Final = "#808080"


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One leaf of a plan.

    Attributes:
      kind: the tree that it belongs to.
      leaf: its layout.
      axes: logical name of each dimension.
      parameter: path of the parameter that it is or belongs to; `None` for counters etc.
      group: group of that parameter.
      field: field of the optimizer state, e.g. `ScaleByAdamState.mu`; otherwise the kind.
      waste: bytes that each device holds beyond an equal share of the leaf.
      reason: why it is replicated; empty if there is no waste.
    """

    kind: Kind
    leaf: LeafLayout
    axes: tuple[Any, ...]
    parameter: str | None
    group: str
    field: str
    waste: int
    reason: str


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The layout and memory of a training step; prints on one screen.

    `print` shows totals, the largest groups and the three leaves with the most waste; `to_data` and
    the command line's `--all` have everything, and `plot` draws the groups.

    Attributes:
      mesh: the mesh.
      params: layout of the parameters; pass `plan.params.shardings` to `jax.jit`.
      grads: layout of the gradients.
      accumulators: layout of the gradient accumulators, or `None`.
      state: layout of the optimizer state.
      rows: a row per leaf, in the order parameters, gradients, accumulators, state.
      explanation: how the logical axes of the state were derived.
      zero: mesh axes that the state is sharded over in addition.
      zero_level: 1 if this applies to the state only, 2 for gradients and accumulators too.
      temporary_bytes: what a step of the transformation needs on a device besides, at most, where
        it says so; in no total.
    """

    mesh: AnyMesh
    params: Layout
    grads: Layout
    accumulators: Layout | None
    state: Layout
    rows: tuple[PlanRow, ...]
    explanation: Explanation
    zero: tuple[str, ...] = ()
    zero_level: int = 1
    temporary_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Global bytes of all leaves."""
        return sum(row.leaf.bytes for row in self.rows)

    @property
    def total_bytes_per_device(self) -> int:
        """Bytes of all leaves per device, in all memory kinds."""
        return sum(row.leaf.bytes_per_device for row in self.rows)

    @property
    def bytes_per_device_by_memory(self) -> dict[str, int]:
        """Bytes per device by memory kind; `'device'` is the default memory."""
        return _sums((row.leaf.memory_kind or "device", row) for row in self.rows)

    @property
    def state_fields(self) -> dict[str, int]:
        """Bytes per device of each field of the optimizer state."""
        return _sums((row.field, row) for row in self.rows if row.kind == "state")

    @property
    def groups(self) -> dict[str, dict[str, int]]:
        """Bytes per device of each kind in each group of parameters, and their `'total'`."""
        groups: dict[str, Counter[str]] = {}
        for row in self.rows:
            group = groups.setdefault(row.group, Counter(dict.fromkeys(KINDS, 0)))
            group.update({row.kind: row.leaf.bytes_per_device})
        return {name: {**sizes, "total": sizes.total()} for name, sizes in groups.items()}

    @functools.cached_property
    def replicated(self) -> tuple[PlanRow, ...]:
        """The leaves of which devices hold more than an equal share, largest waste first."""
        wasteful = (row for row in self.rows if row.waste)
        return tuple(sorted(wasteful, key=lambda row: -row.waste))

    @property
    def notes(self) -> tuple[str, ...]:
        """Every request that could not be satisfied, as `kind path: reason`."""
        return tuple(
            f"{row.kind} {row.leaf.path}: {note}" for row in self.rows for note in row.leaf.notes
        )

    def to_json(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(self.to_data(), indent=1)

    def to_data(self) -> dict[str, Any]:
        """Returns the plan as dicts, lists, strings and numbers."""
        sizes: dict[str, int] = {}
        for kind in KINDS:
            layout, name = getattr(self, kind), kind.removesuffix("s")
            sizes[f"{name}_bytes"] = layout.bytes if layout else 0
            sizes[f"{name}_bytes_per_device"] = layout.bytes_per_device if layout else 0
        return {
            "mesh": dict(self.mesh.shape),
            "zero": list(self.zero),
            "zero_level": self.zero_level,
            **sizes,
            "total_bytes": self.total_bytes,
            "total_bytes_per_device": self.total_bytes_per_device,
            "bytes_per_device_by_memory": self.bytes_per_device_by_memory,
            "state_fields": self.state_fields,
            "temporary_bytes": self.temporary_bytes,
            "groups": self.groups,
            "notes": list(self.notes),
            "rows": [_row_data(row) for row in self.rows],
        }

    def plot(self) -> Figure:
        """Draws a bar for each group: its parameters, gradients, accumulators and state.

        Below each bar, a thin one is the waste among these bytes: what each device holds beyond an
        equal share. Equal groups, such as layers, are one bar. The background is transparent and
        the colours are readable on light and on dark pages.

        Needs matplotlib: `pip install 'opt-partition[plot]'`.

        Returns:
          The figure; `plan.plot().savefig('plan.png')` writes it.
        """
        from matplotlib.figure import Figure

        bars = _bars(self)
        scale, unit = unit_of(max((sizes["total"] for _, sizes, _ in bars), default=0))
        figure = Figure(figsize=(8, 1.3 + 0.5 * len(bars)), layout="constrained")
        figure.patch.set_alpha(0)
        axes: Any = figure.add_subplot(facecolor="none")
        ends = [0.0] * len(bars)
        for kind in _kinds(self):
            label, colour = KINDS[kind]
            widths = [sizes[kind] / scale for _, sizes, _ in bars]
            axes.barh(range(len(bars)), widths, 0.45, ends, color=colour, label=label)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        below = [place + 0.32 for place in range(len(bars))]
        widths = [waste / scale for _, _, waste in bars]
        axes.barh(below, widths, 0.12, color=_WASTE, label="waste: beyond an equal share")
        for place, (end, (_, sizes, _)) in enumerate(zip(ends, bars, strict=True)):
            total = human_bytes(sizes["total"])
            axes.text(end, place, f" {total}", va="center", color=_INK, fontsize=9)
        axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], parse_math=False)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(f"{unit} per device", color=_INK)
        axes.set_title(_title(self), color=_INK, fontsize=10, loc="left")
        axes.tick_params(colors=_INK)
        axes.spines[:].set_visible(False)
        axes.spines["bottom"].set(visible=True, color=_INK)
        figure.legend(
            loc="outside lower center", ncols=5, frameon=False, labelcolor=_INK, fontsize=9
        )
        return figure

    def __str__(self) -> str:
        return plan_text(self)


def _sums(named: Iterable[tuple[str, PlanRow]]) -> dict[str, int]:
    """Returns the sum of bytes per device for each name, in order of first occurrence."""
    sums: Counter[str] = Counter()
    for name, row in named:
        sums[name] += row.leaf.bytes_per_device
    return dict(sums)


def _row_data(row: PlanRow) -> dict[str, Any]:
    leaf = row.leaf
    sizes = {"bytes": leaf.bytes, "bytes_per_device": leaf.bytes_per_device}
    data = {**vars(row), **vars(leaf), **sizes, "dtype": dtype_name(leaf.dtype)}
    return {name: plain(value) for name, value in data.items() if name != "leaf"}


# A pattern for groups that are alike, their names, and the bytes of each of them.
_Groups = list[tuple[str, list[str], dict[str, int]]]


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
        parts.append(_group_table(plan, groups[:4]))
        if rest := groups[4:]:
            count = sum(len(names) for _, names, _ in rest)
            total = sum(len(names) * sizes["total"] for _, names, sizes in rest)
            parts[-1] += f"\n{count:,} more group{'s' * (count > 1)}: {human_bytes(total)}"
    if plan.replicated:
        parts.append(_replicated(plan, None if everything else 3))
    return "\n\n".join(parts)


def _title(plan: MemoryPlan) -> str:
    """Returns the mesh with its size, and what is sharded further over which axes."""
    title = f"mesh {named_sizes(plan.mesh, plan.mesh.axis_names)}: {plan.mesh.size:,} devices"
    if plan.zero:
        what = "state" if plan.zero_level == 1 else "state and gradients"
        title += f"; {what} extended over {', '.join(plan.zero)} (ZeRO-{plan.zero_level})"
    return title


def _kinds(plan: MemoryPlan) -> list[Kind]:
    """Returns the kinds of leaves in a plan."""
    return [kind for kind in KINDS if getattr(plan, kind) is not None]


def _alike_groups(plan: MemoryPlan) -> _Groups:
    """Returns the groups, largest first."""
    alike = collapse(plan.groups.items(), itemgetter(0), lambda item: tuple(item[1].values()))
    groups = [(pattern, [name for name, _ in items], items[0][1]) for pattern, items in alike]
    return sorted(groups, key=lambda group: -len(group[1]) * group[2]["total"])


def _totals(plan: MemoryPlan) -> str:
    parts = [(KINDS[kind][0], getattr(plan, kind)) for kind in _kinds(plan)]
    sizes = [(label, layout.bytes_per_device, layout.bytes) for label, layout in parts]
    sizes.append(("total", plan.total_bytes_per_device, plan.total_bytes))
    rows = [(label, *byte_cells(device), *byte_cells(size)) for label, device, size in sizes]
    if plan.temporary_bytes is not None:
        rows.append(("temporaries, at most", *byte_cells(plan.temporary_bytes), "", ""))
    return format_table(("", "per device", "bytes per device", "global", "bytes"), rows)


def _fields(plan: MemoryPlan) -> str:
    rows = []
    for field, device in plan.state_fields.items():
        leaves = [row.leaf for row in plan.rows if row.kind == "state" and row.field == field]
        dtypes = ", ".join(dict.fromkeys(dtype_name(leaf.dtype) for leaf in leaves))
        size = human_bytes(sum(leaf.bytes for leaf in leaves))
        rows.append((field, f"{len(leaves):,}", dtypes, *byte_cells(device), size))
    head = ("field", "leaves", "dtype", "per device", "bytes per device", "global")
    return format_table(head, rows)


def _group_table(plan: MemoryPlan, groups: _Groups) -> str:
    kinds = _kinds(plan)
    rows = []
    for pattern, names, sizes in groups:
        cells = [human_bytes(sizes[kind]) for kind in kinds]
        rows.append((pattern, f"{len(names):,}", *cells, *byte_cells(sizes["total"])))
    table = format_table(("group", "groups", *kinds, "total", "bytes"), rows)
    return f"bytes per device of each group of parameters\n{table}"


def _replicated(plan: MemoryPlan, most: int | None) -> str:
    """Returns a line for each of the leaves beyond an equal share, worst first."""

    def same(row: PlanRow) -> Any:
        leaf = row.leaf
        return (leaf.shape, str(leaf.dtype), leaf.spec, leaf.memory_kind, row.waste, row.reason)

    alike = collapse(plan.replicated, lambda row: f"{row.kind} {row.leaf.path}", same)
    ranked = sorted(alike, key=lambda item: -len(item[1]) * item[1][0].waste)
    total = sum(row.waste for row in plan.replicated)
    lines = [f"replicated: {human_bytes(total)} ({total:,} bytes) per device beyond an equal share"]
    for pattern, rows in ranked[:most]:
        many = f" ({len(rows):,} leaves)" * (len(rows) > 1)
        waste = human_bytes(len(rows) * rows[0].waste)
        line = f"{pattern}{many}: {waste}, {rows[0].reason}"
        lines.append("  " + (textwrap.shorten(line, 98, placeholder=" ...") if most else line))
    if most and (rest := sum(len(rows) for _, rows in ranked[most:])):
        lines.append(f"  {rest:,} more lea{'ves' if rest > 1 else 'f'}")
    return "\n".join(lines)


def _bars(plan: MemoryPlan) -> list[tuple[str, dict[str, int], int]]:
    """Returns label, bytes of each kind and waste of the 12 largest bars, and of the rest."""
    wasted: Counter[str] = Counter()
    for row in plan.rows:
        wasted[row.group] += row.waste
    bars = [
        (
            f"{pattern} ({len(names)})" if len(names) > 1 else pattern,
            {kind: len(names) * size for kind, size in sizes.items()},
            sum(wasted[name] for name in names),
        )
        for pattern, names, sizes in _alike_groups(plan)
    ]
    if rest := bars[12:]:
        sizes = {kind: sum(sizes[kind] for _, sizes, _ in rest) for kind in rest[0][1]}
        bars[12:] = [(f"{len(rest):,} more", sizes, sum(waste for _, _, waste in rest))]
    return bars
