"""A picture of one leaf, with its dimensions divided into shards."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Sequence

# Lengths are in CSS pixels.
_WIDTH = 230
_LEFT, _TOP = 30, 24
_LONGEST, _HIGHEST, _SHORTEST, _BAR = 168, 112, 48, 30
_STRIP, _STRIP_PITCH = 12, 30
_SHEET = 5
_GAP = 16
_MOST_CELLS = 16
_CELLS_BEFORE_GAP = 6

# Shared by all pictures of a page.
HATCH = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" class="copy-ground"/>'
    '<line x1="0" y1="0" x2="0" y2="6" class="copy-line"/></pattern></defs></svg>'
)


@dataclasses.dataclass(frozen=True)
class Side:
    """One dimension of a leaf.

    Attributes:
      dimension: its index.
      size: its size.
      ways: its number of shards.
      over: mesh axes that it is sharded over, as text; empty if not sharded.
    """

    dimension: int
    size: int
    ways: int = 1
    over: str = ""

    @property
    def tag(self) -> str:
        """The label of the side."""
        return f"dim {self.dimension}" + (f": {self.over}" if self.over else "")


def picture(sides: Sequence[Side], copies: int, label: str) -> str:
    """Draws a leaf as inline SVG.

    Two dimensions are drawn as a rectangle divided into shards: sharded ones first, then the
    longest. All others are strips below it. The first shard, held by one device, is highlighted.
    Copies on other devices are hatched, as sheets behind the rectangle, or as the rectangle itself
    if nothing is sharded.

    Args:
      sides: the dimensions.
      copies: number of devices that hold the same shard.
      label: alternative text for screen readers.

    Returns:
      An `svg` element, which needs the styles of the page and `HATCH`.
    """
    face = _face(sides)
    strips = [side for side in sides if side not in face]
    rows = face[0] if len(face) == 2 else None
    columns = face[-1] if face else None
    width, height = _face_size(rows, columns)
    is_whole = all(side.ways == 1 for side in sides)
    sheets = 0 if is_whole or copies == 1 else min(3, copies - 1)
    y: float = _TOP + sheets * _SHEET
    body = [
        f'<rect x="{_LEFT + n * _SHEET}" y="{y - n * _SHEET}" width="{width}" '
        f'height="{height}" class="copy"/>'
        for n in range(sheets, 0, -1)
    ]
    ways = (rows.ways if rows else 1, columns.ways if columns else 1)
    is_copied = is_whole and copies > 1
    body += _grid(_LEFT, y, width, height, ways, is_copied)
    if columns:
        body.append(_text(_LEFT, _TOP - 8, columns.tag))
    if rows:
        body.append(_text(_LEFT - 8, y + height / 2, rows.tag, is_upright=True))
    y += height + 8
    for strip in strips:
        body.append(_text(_LEFT, y + 10, strip.tag))
        body += _grid(_LEFT, y + 14, _LONGEST, _STRIP, (1, strip.ways), is_copied)
        y += _STRIP_PITCH
    # A vertical label may be longer than the rectangle is high.
    upright = _TOP + 6 * len(rows.tag) if rows else 0
    return (
        f'<svg role="img" width="{_WIDTH}" height="{max(y, upright):g}">'
        f"<title>{html.escape(label)}</title>{''.join(body)}</svg>"
    )


def _face(sides: Sequence[Side]) -> list[Side]:
    """Returns the (up to two) dimensions that are drawn as a rectangle, in order."""
    ranked = sorted(sides, key=lambda side: (-side.ways, -side.size, side.dimension))
    return sorted(ranked[:2], key=lambda side: side.dimension)


def _face_size(rows: Side | None, columns: Side | None) -> tuple[float, float]:
    """Returns width and height, with the aspect ratio compressed."""
    if columns is None:
        return _BAR, _BAR
    if rows is None:
        return _LONGEST, _BAR
    ratio = math.sqrt(max(rows.size, 1) / max(columns.size, 1))
    if ratio * _LONGEST <= _HIGHEST:
        return _LONGEST, max(_SHORTEST, round(ratio * _LONGEST))
    return max(_SHORTEST, round(_HIGHEST / ratio)), _HIGHEST


def _grid(
    x: float, y: float, width: float, height: float, ways: tuple[int, int], is_copied: bool
) -> Iterator[str]:
    """Yields the shards of a rectangle with `ways` rows and columns."""
    for top, high, row in _cells(height, ways[0]):
        for left, wide, column in _cells(width, ways[1]):
            if row is None or column is None:
                kind = "gap"
            elif is_copied:
                kind = "copy"
            else:
                kind = "rest" if row or column else "mine"
            yield (
                f'<rect x="{x + left:g}" y="{y + top:g}" width="{wide:g}" height="{high:g}" '
                f'class="{kind}"/>'
            )
            if kind == "gap":
                yield from _dots(x + left, y + top, wide, high)


def _cells(length: float, ways: int) -> Iterator[tuple[float, float, int | None]]:
    """Yields the start, length and number of each shard; `None` stands for omitted ones."""
    if ways <= _MOST_CELLS:
        size = length / ways
        yield from ((n * size, size, n) for n in range(ways))
        return
    gap = min(_GAP, length / 4)
    size = (length - gap) / (_CELLS_BEFORE_GAP + 1)
    yield from ((n * size, size, n) for n in range(_CELLS_BEFORE_GAP))
    yield _CELLS_BEFORE_GAP * size, gap, None
    yield length - size, size, ways - 1


def _dots(x: float, y: float, width: float, height: float) -> Iterator[str]:
    """Yields dots along the longer side of a gap."""
    across, down = (width / 4, 0.0) if width > height else (0.0, height / 4)
    for n in (-1, 0, 1):
        yield (
            f'<circle cx="{x + width / 2 + n * across:g}" cy="{y + height / 2 + n * down:g}" '
            'r="1.2" class="dot"/>'
        )


def _text(x: float, y: float, text: str, *, is_upright: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:g} {y:g})" text-anchor="middle"' if is_upright else ""
    return f'<text x="{x:g}" y="{y:g}"{turn}>{html.escape(text)}</text>'
