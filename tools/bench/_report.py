"""Pictures of what was measured, and what has changed since the last time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from _common import label, verdict

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


def _ratios(records: Records) -> Any:
    """Every ratio with its quartiles, and its limit."""
    figure, axes = plt.subplots(figsize=(9, 1 + 0.24 * len(records)))
    for y, record in enumerate(records):
        color = {"OVER": "tab:red", "?": "tab:orange"}.get(verdict(record), "tab:blue")
        axes.plot([record["low"], record["high"]], [y, y], color=color)
        axes.plot(record["ratio"], y, "o", color=color, markersize=4)
        if record["limit"] is not None:
            axes.plot(record["limit"], y, "|", color="black", markersize=9)
    axes.set_yticks(range(len(records)), [f"{label(r)} / {r['peer']}" for r in records], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="grey", linewidth=0.5)
    axes.set_xlabel("ratio to the peer, quartiles over rounds; | is the limit")
    return figure


def _sizes(records: Records) -> Any:
    """Seconds against the number of leaves, where a figure was taken at several."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record["unit"] == "s" and record["size"] is not None:
            series.setdefault(f"{record['benchmark']}: {record['figure']}", []).append(record)
    series = {name: rows for name, rows in series.items() if len(rows) > 1}
    if not series:
        return None
    figure, axes = plt.subplots(figsize=(8, 6))
    for name, rows in series.items():
        rows.sort(key=lambda row: row["size"])
        axes.plot([r["size"] for r in rows], [r["ours"] for r in rows], "o-", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("leaves")
    axes.set_ylabel("seconds")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bytes(records: Records) -> Any:
    """Bytes, and how many there may be."""
    rows = [record for record in records if record["unit"] == "B"]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(rows)))
    axes.barh(range(len(rows)), [row["ours"] for row in rows], color="tab:blue", height=0.5)
    for y, row in enumerate(rows):
        if row["limit"] is not None:
            axes.plot(row["limit"] * row["theirs"], y, "|", color="black", markersize=14)
    axes.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("bytes; | is the limit")
    return figure
