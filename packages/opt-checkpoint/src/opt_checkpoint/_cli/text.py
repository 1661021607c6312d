"""Output of the command line: names in a checkpoint may hold anything, and are escaped."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from opt_core.extend import aligned


def printable(text: str) -> str:
    r"""Returns text with control characters, and what cannot be printed, as Python's escapes.

    Examples:
      >>> print(printable('a\nb\x1b[31m'), printable('\ud800'), printable('größe'))
      a\nb\x1b[31m \ud800 größe
    """
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


def say(line: str) -> None:
    """Prints one line on standard output."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(line).encode(encoding, "backslashreplace").decode(encoding))


def say_folded(line: str) -> None:
    """Prints a line, wrapped to the terminal; names are not split."""
    parts = textwrap.wrap(
        printable(line),
        shutil.get_terminal_size().columns,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    for part in parts or [""]:
        say(part)


def say_table(rows: Sequence[Sequence[str]], sides: str) -> None:
    """Prints a table; see `aligned`."""
    for line in aligned([[printable(cell) for cell in row] for row in rows], sides):
        say_folded(line)


def say_lines(text: str, names: Iterable[str]) -> None:
    """Prints a text of several lines; names in it may hold line breaks."""
    for name in names:
        text = text.replace(name, printable(name))
    for line in text.split("\n"):
        say_folded(line)


def one_line(error: object) -> str:
    """Returns what an error says as one printable line."""
    return printable(" ".join(str(error).split()))


def amount(count: int) -> str:
    """Returns a number of bytes as text.

    Examples:
      >>> amount(1000), amount(3 * 2**20)
      ('1000 B', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min((count.bit_length() - 1) // 10, len(units))
    return f"{count / 1024**power:,.1f} {units[power - 1]}"
