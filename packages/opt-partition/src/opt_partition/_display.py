"""Formatting for people: tables, bytes as text, repeated leaves in one row."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

_T = TypeVar("_T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NUMBER = re.compile(r"(?<!~)\d+")  # a path escapes `~` and `/` in keys as `~0` and `~1`
_FIGURE = re.compile(r"[\d,.]*( [KMGTPE]?i?B)?")


def listed(things: Sequence[object], most: int = 4) -> str:
    """Returns the first few of several things, and how many more there are."""
    more = f" and {len(things) - most} more" * (len(things) > most)
    return ", ".join(map(str, things[:most])) + more


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns columns below a header, without trailing spaces; figures are aligned at the right."""
    columns = [*zip(head, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    are_figures = [all(map(_FIGURE.fullmatch, column[1:])) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_figure else cell.ljust(width)
            for cell, width, is_figure in zip(line, widths, are_figures, strict=True)
        ).rstrip()
        for line in [head, *rows]
    )


def unit_of(count: int) -> tuple[int, str]:
    """Returns the largest unit in which a number of bytes is at least 1: its bytes, and name."""
    power = min(max(0, (count.bit_length() - 1) // 10), len(_UNITS) - 1)
    return 1024**power, _UNITS[power]


def human_bytes(count: int) -> str:
    """Returns a number of bytes in the largest unit in which it is at least 1: `1.50 KiB`."""
    size, unit = unit_of(count)
    return f"{count:,} B" if size == 1 else f"{count / size:,.2f} {unit}"


def byte_cells(count: int) -> tuple[str, str]:
    """Returns two table cells: bytes in human-readable units, and the exact number."""
    return human_bytes(count), f"{count:,}"


@functools.cache  # NumPy composes the name each time
def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def plain(value: Any) -> Any:
    """Returns a tuple or spec as a list, also inside of others."""
    is_several = isinstance(value, tuple | PartitionSpec)
    return [plain(entry) for entry in value] if is_several else value


def collapse(
    leaves: Iterable[_T], path: Callable[[_T], str], same: Callable[[_T], Hashable]
) -> Iterator[tuple[str, list[_T]]]:
    """Yields leaves whose paths differ only in numbers, below a path with `*` for these."""
    groups: dict[Hashable, list[_T]] = {}
    for leaf in leaves:
        groups.setdefault((*_NUMBER.split(path(leaf)), same(leaf)), []).append(leaf)
    for group in groups.values():
        words = _NUMBER.split(path(group[0]))
        places = zip(*(_NUMBER.findall(path(leaf)) for leaf in group), strict=True)
        numbers = [values[0] if len({*values}) == 1 else "*" for values in places]
        yield "".join(a + b for a, b in zip(words, [*numbers, ""], strict=True)), group
