"""What the command line prints: tables on standard output, progress on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from opt_checkpoint._cli.text import printable, say

Advance = Callable[[str, int], None]


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]
) -> None:
    """Prints a table with its columns aligned.

    Args:
      columns: their heads.
      rows: the cells.
      right: the columns that hold numbers.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        )
        say("  ".join(cells).rstrip())


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A bar over bytes on standard error, by rich where it is installed; none in a pipe.

    Args:
      total: how many bytes there are.

    Yields:
      A function of what is being done and how many bytes of it are done.
    """
    if not sys.stderr.isatty():
        yield lambda what, count: None
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield from _plain(total)
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", table_column=None),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(what: str, count: int) -> None:
            bar.update(task, advance=count, description=printable(what)[-40:].replace("[", r"\["))

        yield advance


def _plain(total: int) -> Iterator[Advance]:
    done = 0

    def advance(what: str, count: int) -> None:
        nonlocal done
        done += count
        share = 100 * done // max(total, 1)
        print(f"\r{share:3}% {printable(what)[-60:]:60}", end="", file=sys.stderr, flush=True)

    try:
        yield advance
    finally:
        print(f"\r{'':66}\r", end="", file=sys.stderr, flush=True)


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
