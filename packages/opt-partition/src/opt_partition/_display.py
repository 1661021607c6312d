"""Formatting for people: tables, bytes and shapes as text, repeated leaves in one row."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NUMBER = re.compile(r"(?<!~)\d+")  # a path escapes `~` and `/` in keys as `~0` and `~1`


def format_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[str] = (),
    *,
    rule: bool = False,
) -> str:
    """Returns aligned columns below a header, without trailing spaces."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, *([["-" * width for width in widths]] if rule else []), *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def unit_of(count: int) -> tuple[int, str]:
    """Returns the largest unit in which a number of bytes is at least 1: its bytes, and name."""
    power = min(max(0, (count.bit_length() - 1) // 10), len(_UNITS) - 1)
    return 1024**power, _UNITS[power]


def human_bytes(count: int) -> str:
    """Returns a number of bytes in the largest unit in which it is at least 1.

    Examples:
      >>> human_bytes(1023), human_bytes(1536), human_bytes(13_421_772_800)
      ('1,023 B', '1.50 KiB', '12.50 GiB')
    """
    size, unit = unit_of(count)
    return f"{count:,} B" if size == 1 else f"{count / size:,.2f} {unit}"


def byte_cells(count: int) -> tuple[str, str]:
    """Returns two table cells: bytes in human-readable units, and the exact number."""
    return human_bytes(count), f"{count:,}"


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype."""
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def join_ints(sizes: Iterable[int]) -> str:
    """Returns a shape as text."""
    return "x".join(map(str, sizes)) or "scalar"


def join_entries(entries: Iterable[Any]) -> str:
    """Returns the entries of a `PartitionSpec` as text."""

    def text(entry: Any) -> str:
        if isinstance(entry, tuple | list):
            return "+".join(map(str, entry)) or "-"
        return "-" if entry is None else str(entry)

    return ", ".join(map(text, entries))


def collapse(
    leaves: Iterable[_T], path: Callable[[_T], str], same: Callable[[_T], Hashable]
) -> Iterator[tuple[str, list[_T]]]:
    """Groups leaves whose paths differ only in numbers, and that `same` maps to the same key.

    Yields a pattern for the paths of each group, and its leaves, in order of first occurrence:
    `('layers_{0..79}/w', [...])`.
    """
    groups: dict[Hashable, list[_T]] = {}
    for leaf in leaves:
        groups.setdefault((words(path(leaf)), same(leaf)), []).append(leaf)
    for group in groups.values():
        yield pattern([path(leaf) for leaf in group]), group


def words(path: str) -> tuple[str, ...]:
    """Returns the parts of a path between its numbers."""
    return tuple(_NUMBER.split(path))


def pattern(paths: Sequence[str]) -> str:
    """Returns a pattern for paths with the same `words`."""
    places = list(zip(*map(_NUMBER.findall, paths), strict=True))
    # `a_{0..1}/b_{0..1}` means four paths, and would be misleading for fewer.
    is_product = math.prod(len(set(values)) for values in places) == len(set(paths))
    spans = [_span(set(values), is_product) for values in places]
    return "".join(itertools.chain(*itertools.zip_longest(words(paths[0]), spans, fillvalue="")))


def _span(values: set[str], is_product: bool) -> str:
    """Returns the text for the numbers in one position."""
    if len(values) == 1:
        return next(iter(values))
    ordered = sorted(map(int, values))
    # Leading zeros, as in `layer_007`, would be lost.
    plain = values == {str(number) for number in range(ordered[0], ordered[-1] + 1)}
    return f"{{{ordered[0]}..{ordered[-1]}}}" if plain and is_product else "{*}"
