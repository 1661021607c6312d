"""What the command line prints: names out of a checkpoint may hold anything, and are escaped."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from opt_checkpoint._planning.plan import Plan, Row


def printable(text: str) -> str:
    r"""Returns text with what a terminal would act on, or cannot show, as Python's escapes.

    Examples:
      >>> print(printable('a\nb\x1b[31m'), printable('\ud800'), printable('größe'))
      a\nb\x1b[31m \ud800 größe
    """
    if text.isprintable():
        return text
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


def say(line: str) -> None:
    """Prints one line on standard output."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(line).encode(encoding, "backslashreplace").decode(encoding))


def say_folded(text: str) -> None:
    """Prints lines that go on below where the terminal ends; names stay whole."""
    for line in text.split("\n"):
        for part in _folded(line, "    ") or [""]:
            say(part)


def say_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    """Prints a table; columns that the terminal has no room for go on below their row.

    Args:
      columns: their heads.
      rows: the cells.
      right: the columns that hold numbers.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    ends = (end - 2 for end in itertools.accumulate(width + 2 for width in widths))
    kept = max(1, sum(end <= _room() for end in ends))
    for row in (columns, *rows):
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths[:kept], strict=False)
        )
        say("  ".join(cells).rstrip())
        rest = zip(columns[kept:], row[kept:], strict=True)
        below = "  ".join(f"{name} {cell}" for name, cell in rest if cell)
        for line in _folded(f"    {below}", "    ") if below and row is not columns else ():
            say(line)


def _folded(line: str, indent: str) -> list[str]:
    return textwrap.wrap(
        line,
        _room(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        expand_tabs=False,
        replace_whitespace=False,
    )


def _room() -> int:
    return shutil.get_terminal_size().columns


def one_line(error: object) -> str:
    """Returns what an error says as one printable line."""
    return printable(" ".join(str(error).split()))


def printable_plan(plan: Plan[Any]) -> Plan[Any]:
    """Returns a plan to be shown, with printable names; it is not one to be applied."""

    def row(given: Row) -> Row:
        return dataclasses.replace(
            given,
            leaf=dataclasses.replace(given.leaf, path=tuple(map(printable, given.leaf.path))),
            sources=tuple(map(printable, given.sources)),
            note=printable(given.note),
            problem=printable(given.problem),
        )

    return dataclasses.replace(
        plan,
        rows=tuple(map(row, plan.rows)),
        dropped=tuple(map(row, plan.dropped)),
        changes=tuple(map(printable, plan.changes)),
        problems=tuple(map(printable, plan.problems)),
    )


def say_progress(text: str) -> None:
    """Shows how far long work is, in one line of a terminal; nothing in a pipe."""
    if sys.stderr.isatty():
        print(f"\r{printable(text)[:65]:65}\r", end="", file=sys.stderr, flush=True)


def amount(count: int) -> str:
    """Returns a number of bytes for people.

    Examples:
      >>> amount(1000), amount(3 * 2**20)
      ('1000 B', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min((count.bit_length() - 1) // 10, len(units))
    return f"{count / 1024**power:,.1f} {units[power - 1]}"
