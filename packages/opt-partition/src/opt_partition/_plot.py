"""A memory plan as a picture."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from opt_partition._display import human_bytes, unit_of
from opt_partition._plan_text import alike_groups, plan_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from opt_partition._plan import MemoryPlan

_GROUPS: Final = 12
# Mid tones, with a contrast of at least 3 to white and to a dark page's #14191f.
_KINDS: Final = {
    "params": ("parameters", "#3b7dbb"),
    "grads": ("gradients", "#b9770e"),
    "accumulators": ("accumulators", "#8e6fc9"),
    "state": ("optimizer state", "#2f9161"),
}
_WASTE: Final = "#d1495b"
_INK: Final = "#808080"


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
    for kind, (label, colour) in _KINDS.items():
        if kind != "accumulators" or plan.accumulators is not None:
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
    axes.set_title(plan_title(plan), color=_INK, fontsize=10, loc="left")
    axes.tick_params(colors=_INK)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=_INK)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, labelcolor=_INK, fontsize=9)
    return figure


def _bars(plan: MemoryPlan) -> list[tuple[str, dict[str, int], int]]:
    """Returns the label, the bytes of each kind and the waste of each bar, largest first."""
    wasted: Counter[str] = Counter()
    for row in plan.rows:
        wasted[row.group] += row.waste
    bars = [
        (
            f"{pattern} ({len(names)})" if len(names) > 1 else pattern,
            {kind: len(names) * getattr(group, kind) for kind in _KINDS},
            sum(wasted[name] for name in names),
        )
        for pattern, names, group in alike_groups(plan)
    ]
    rest = bars[_GROUPS:]
    if rest:
        sizes = {kind: sum(sizes[kind] for _, sizes, _ in rest) for kind in _KINDS}
        bars[_GROUPS:] = [(f"{len(rest):,} more", sizes, sum(waste for _, _, waste in rest))]
    return bars
