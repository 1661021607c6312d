"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns under a head, without trailing blanks.

    Examples:
      >>> print(format_table(['leaf', 'bytes'], [['mu/kernel', '64'], ['nu', '8']]))
      leaf       bytes
      mu/kernel  64
      nu         8
    """
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
