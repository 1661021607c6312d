"""Pictures of what was measured, and what has changed since the last time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from _common import amount, label, verdict
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

Records = Sequence[Mapping[str, Any]]


def changes(records: Records, last: Records) -> list[str]:
    """Returns what is new, gone, or different by more than both spreads together.

    Args:
      records: the rows of this run.
      last: those of the run before.
    """
    before = {label(record): record for record in last}
    now = {label(record): record for record in records}
    lines = [f"new: {name}" for name in now if name not in before]
    lines += [f"gone: {name}" for name in before if name not in now]
    for name in now.keys() & before.keys():
        new, old = now[name], before[name]
        apart = max(new["low"], old["low"]) > min(new["high"], old["high"])
        if apart and abs(new["ratio"] - old["ratio"]) > 0.01 * abs(old["ratio"]):
            lines.append(f"{name}: {old['ratio']:.2f} -> {new['ratio']:.2f} of {new['peer']}")
        if (was := verdict(old)) != (is_ := verdict(new)) and "OVER" in (was, is_):
            lines.append(f"{name}: {was or 'no limit'} -> {is_ or 'no limit'}")
    return sorted(lines)


def draw(records: Records, folder: Path) -> list[Path]:
    """Writes `ratios.png`, `sizes.png` and `bytes.png`, each if there is anything for it."""
    plots = {"ratios": _ratios, "sizes": _sizes, "bytes": _bytes}
    found = []
    for name, plot in plots.items():
        figure = plot(records)
        if figure is not None:
            found.append(folder / f"{name}.png")
            figure.savefig(found[-1], dpi=120, bbox_inches="tight")
            plt.close(figure)
    return found


_COLORS = {"OVER": "tab:red", "?": "tab:orange"}


def _ratios(records: Records) -> Any:
    """Every ratio with its quartiles, and its limit."""
    rows = [record for record in records if math.isfinite(record["ratio"])]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.22 * len(rows)))
    for y, record in enumerate(rows):
        color = _COLORS.get(verdict(record), "tab:blue")
        axes.plot([record["low"], record["high"]], [y, y], color=color, linewidth=2)
        axes.plot(record["ratio"], y, "o", color=color, markersize=4)
        if record["limit"] is not None:
            axes.plot(record["limit"], y, "|", color="black", markersize=9)
    _lines(axes, rows, [f"{label(record)} / {record['peer']}" for record in rows])
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.grid(axis="x", which="major", color="0.85")
    axes.set_axisbelow(True)
    lowest, highest = max(axes.get_xlim()[0], 1e-4), min(axes.get_xlim()[1], 1e4)
    axes.set_xlim(lowest, highest)
    steps = (1.0, 2.0, 5.0) if highest < 1e3 * lowest else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=30))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("ratio to the peer: median and quartiles of the rounds")
    axes.tick_params(top=True, labeltop=True)
    _legend(axes)
    return figure


def _sizes(records: Records) -> Any:
    """Seconds against sizes, in a panel for each benchmark that was run at several."""
    series: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for record in records:
        if record["unit"] == "s" and record["size"] is not None:
            panel = series.setdefault(record["benchmark"], {})
            panel.setdefault(record["figure"], []).append(record)
    panels = {
        name: kept
        for name, found in series.items()
        if (kept := {figure: rows for figure, rows in found.items() if len(rows) > 1})
    }
    if not panels:
        return None
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(7 * columns, 4 * lines), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (name, found) in zip(grid.flat, panels.items(), strict=False):
        for number, (title, rows) in enumerate(found.items()):
            rows.sort(key=lambda row: row["size"])
            sizes, color = [row["size"] for row in rows], f"C{number % 10}"
            style = "-" if number < 10 else "-."
            axes.plot(sizes, [row["ours"] for row in rows], "o" + style, color=color, label=title)
            axes.plot(sizes, [row["theirs"] for row in rows], ":", color=color, linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_xscale("log")
        axes.set_yscale("log")
        every = sorted({row["size"] for rows in found.values() for row in rows})
        axes.set_xticks(every, [f"{size:,}" for size in every])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: amount(y, "s")))
        axes.tick_params(labelsize=8)
        axes.grid(color="0.9")
        axes.set_xlabel(next(iter(found.values()))[0]["sizes"], fontsize=8)
        axes.legend(fontsize=7)
    figure.suptitle("Cost against size; dotted: the peer")
    figure.tight_layout()
    return figure


def _bytes(records: Records) -> Any:
    """Bytes as a part of how many there may be."""
    rows = [row for row in records if row["unit"] == "B" and row["limit"] and row["theirs"]]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.24 * len(rows)))
    labels = []
    for y, row in enumerate(rows):
        most = row["limit"] * row["theirs"]
        axes.barh(y, row["ours"] / most, color=_COLORS.get(verdict(row), "tab:blue"), height=0.6)
        labels.append(f"{label(row)}: {amount(row['ours'], 'B')} of {amount(most, 'B')}")
    _lines(axes, rows, labels)
    axes.axvline(1.0, color="black", linewidth=1.2)
    axes.grid(axis="x", color="0.85")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("bytes, as a part of the limit")
    _legend(axes, "over it by less than the spread", "limit")
    return figure


def _lines(axes: Any, rows: Records, labels: Sequence[str]) -> None:
    """Names the lines of a picture, and parts those of one benchmark from the next."""
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for y, (one, other) in enumerate(itertools.pairwise(rows)):
        if one["benchmark"] != other["benchmark"]:
            axes.axhline(y + 0.5, color="0.6", linewidth=0.6)


def _legend(axes: Any, *without: str) -> None:
    """Says above a picture what its marks mean."""
    marks: dict[str, dict[str, Any]] = {
        "within the limit, or none": {"color": "tab:blue", "linewidth": 3},
        "over it by less than the spread": {"color": "tab:orange", "linewidth": 3},
        "over it": {"color": "tab:red", "linewidth": 3},
        "limit": {"color": "black", "marker": "|", "linewidth": 0, "markersize": 9},
    }
    kept = {name: style for name, style in marks.items() if name not in without}
    axes.legend(
        handles=[Line2D([], [], label=name, **style) for name, style in kept.items()],
        fontsize=7,
        ncols=4,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=2.5,
    )
