"""A self-contained HTML page with tables, and pictures of how arrays are sharded."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from opt_partition._cli.pictures import Card, Family
from opt_partition._cli.svg import HATCH
from opt_partition._display import Table

_STYLE = """
:root { --ink: #1c2733; --faint: #5d6b7a; --line: #d5dce4; --ground: #fff; --panel: #f6f8fa;
  --mine: #1f6fb2; --rest: #cfe3f4; --copy: #e4e4e4; --hatch: #9a9a9a; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e9ef; --faint: #9aa8b6; --line: #3a4653;
  --ground: #14191f; --panel: #1c232b; --mine: #58a6e6; --rest: #27445c; --copy: #33373c;
  --hatch: #70767d; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  margin: 2rem auto; max-width: 84rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p { margin: .3rem 0; color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--faint); }
.number { text-align: right; white-space: nowrap; }
code { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; }
section { border: 1px solid var(--line); border-radius: 8px; background: var(--panel);
  padding: .8rem 1rem; margin: 1rem 0; }
section > ul { list-style: none; margin: 0 0 .6rem; padding: 0; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem 1.6rem; }
figure { margin: 0; width: 270px; }
figcaption { font-size: 12.5px; overflow-wrap: anywhere; }
figcaption div { color: var(--faint); }
svg { overflow: visible; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); }
svg rect { stroke: var(--ground); stroke-width: .8; }
.mine { fill: var(--mine); } .rest { fill: var(--rest); }
.gap { fill: var(--panel); stroke: none; } .dot { fill: var(--faint); }
.copy { fill: url(#hatch); stroke: var(--hatch) !important; }
.copy-ground { fill: var(--copy); stroke: none !important; }
.copy-line { stroke: var(--hatch); stroke-width: 2; }
.legend svg { vertical-align: -3px; margin: 0 .3rem 0 .9rem; }
"""


def page(
    title: str,
    subtitle: str,
    tables: Iterable[Table],
    families: Iterable[Family],
    *,
    has_mesh: bool = True,
) -> str:
    """Returns a self-contained HTML page.

    Args:
      title: title of the page.
      subtitle: one line of description.
      tables: the tables at the top.
      families: the pictures below.
      has_mesh: whether pictures show shards on a mesh, or only dimensions.
    """
    pictures = [_MESH_HEAD, _LEGEND] if has_mesh else [_NAMES_HEAD]
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"{HATCH}\n<h1>{html.escape(title)}</h1>\n<p>{html.escape(subtitle)}</p>",
        *map(_table, tables),
        *pictures,
        *map(_section, families),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


_MESH_HEAD = "<h2>How parameters and their state are sharded over the mesh</h2>"
_NAMES_HEAD = "<h2>Dimensions of the state of every parameter</h2>"


def _swatch(kind: str) -> str:
    return f'<svg width="16" height="16"><rect width="16" height="16" class="{kind}"/></svg>'


_LEGEND = (
    f'<p class="legend">{_swatch("mine")}held by one device{_swatch("rest")}on other devices'
    f"{_swatch('copy')}replicated on several devices</p>"
)


def _table(table: Table) -> str:
    styles = [' class="number"' if name in table.right else "" for name in table.columns]
    head = _cells("th", table.columns, styles)
    body = "\n".join(f"<tr>{_cells('td', row, styles)}</tr>" for row in table.rows)
    return (
        f'<h2>{html.escape(table.title)}</h2>\n<div class="scroll"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cells(tag: str, cells: Iterable[str], styles: Iterable[str]) -> str:
    return "".join(
        f"<{tag}{style}>{html.escape(cell)}</{tag}>"
        for cell, style in zip(cells, styles, strict=True)
    )


def _section(family: Family) -> str:
    paths = "".join(f"<li><code>{html.escape(path)}</code></li>" for path in family.paths)
    cards = "\n".join(map(_card, family.cards))
    return f'<section>\n<ul>{paths}</ul>\n<div class="cards">\n{cards}\n</div>\n</section>'


def _card(card: Card) -> str:
    lines = "".join(f"<div>{html.escape(line)}</div>" for line in _lines(card))
    fields = "<br>".join(f"<b>{html.escape(field)}</b>" for field in card.fields)
    return f"<figure>{card.item.svg()}<figcaption>{fields}{lines}</figcaption></figure>"


def _lines(card: Card) -> Iterator[str]:
    item = card.item
    yield from item.dimensions or ["a scalar"]
    axes, count = item.copies
    if count > 1:
        yield f"{count:,} copies: {axes}"
    yield from item.remarks
