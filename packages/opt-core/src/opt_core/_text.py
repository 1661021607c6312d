"""Lists and tables in messages and reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def listed(names: Iterable[str], none: str = "none") -> str:
    """Returns names as a list for messages.

    Examples:
      >>> listed(['b1', 'b2']), listed([])
      ('`b1`, `b2`', 'none')
    """
    return ", ".join(f"`{name}`" for name in names) or none


def aligned(rows: Sequence[Sequence[str]], sides: str) -> Iterator[str]:
    """Yields the lines of a table; `sides` aligns columns: `<` to the left, `>` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(row, sides, widths, strict=True)
        yield "  ".join(f"{cell:{side}{width}}" for cell, side, width in columns).rstrip()
