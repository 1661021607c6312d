"""Formatting for people: tables, bytes and shapes as text, repeated leaves in one row."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NUMBER = re.compile(r"(?<!~)\d+")  # a path escapes `~` and `/` in keys as `~0` and `~1`


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
      title: title of the table.
      columns: column headers.
      rows: cells of each row.
      right: the columns that are right-aligned, e.g. numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()

    def __str__(self) -> str:
        head, *rows = self.lines()
        rule = "  ".join("-" * size for size in self._widths())
        return "\n".join([self.title, head, rule, *rows])

    def lines(self) -> list[str]:
        """Returns the aligned header and rows."""
        widths = self._widths()
        return [self._line(cells, widths) for cells in (self.columns, *self.rows)]

    def _widths(self) -> list[int]:
        return [max(map(len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = (
            cell.rjust(width) if name in self.right else cell.ljust(width)
            for name, cell, width in zip(self.columns, cells, widths, strict=True)
        )
        return "  ".join(padded).rstrip()


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned columns below a header, without trailing spaces.

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


def human_bytes(count: int) -> str:
    """Returns a number of bytes in the largest unit in which it is at least 1.

    Examples:
      >>> human_bytes(1023), human_bytes(1536), human_bytes(13_421_772_800)
      ('1,023 B', '1.50 KiB', '12.50 GiB')
    """
    size = min(max(0, (count.bit_length() - 1) // 10), len(_UNITS) - 1)
    return f"{count:,} B" if not size else f"{count / 1024**size:,.2f} {_UNITS[size]}"


def byte_cells(count: int) -> tuple[str, str]:
    """Returns two table cells: bytes in human-readable units, and the exact number.

    Examples:
      >>> byte_cells(1536)
      ('1.50 KiB', '1,536')
    """
    return human_bytes(count), f"{count:,}"


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype.

    Examples:
      >>> dtype_name(jax.numpy.dtype('float32')), dtype_name(jax.dtypes.float0)
      ('float32', 'float0')
    """
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def join_ints(sizes: Iterable[int]) -> str:
    """Returns a shape as text.

    Examples:
      >>> join_ints((8192, 64)), join_ints(())
      ('8192x64', 'scalar')
    """
    return "x".join(map(str, sizes)) or "scalar"


def entry_text(entry: Any) -> str:
    """Returns one entry of a `PartitionSpec` as text.

    Examples:
      >>> entry_text("embed"), entry_text(None), entry_text(("data", "fsdp"))
      ('embed', '-', 'data+fsdp')
    """
    if isinstance(entry, tuple | list):
        return "+".join(map(str, entry)) or "-"
    return "-" if entry is None else str(entry)


def join_entries(entries: Iterable[Any]) -> str:
    """Returns the entries of a `PartitionSpec` as text.

    Examples:
      >>> join_entries(("embed", None, ("data", "fsdp")))
      'embed, -, data+fsdp'
    """
    return ", ".join(map(entry_text, entries))


def collapse(
    leaves: Iterable[_T], path: Callable[[_T], str], same: Callable[[_T], Hashable]
) -> Iterator[tuple[str, list[_T]]]:
    """Groups leaves whose paths differ only in numbers.

    Args:
      leaves: any objects with a path.
      path: returns the path of a leaf.
      same: returns a key that leaves of a group must share.

    Yields:
      A pattern for the paths of each group, and its leaves, in order of first occurrence.

    Examples:
      >>> paths = ["0/mu/layers_0/w", "0/mu/layers_1/w", "0/mu/layers_2/w", "0/mu/out"]
      >>> [(pattern, len(group)) for pattern, group in collapse(paths, str, len)]
      [('0/mu/layers_{0..2}/w', 3), ('0/mu/out', 1)]
    """
    groups: dict[Hashable, list[_T]] = {}
    for leaf in leaves:
        groups.setdefault((words(path(leaf)), same(leaf)), []).append(leaf)
    for group in groups.values():
        yield pattern([path(leaf) for leaf in group]), group


def words(path: str) -> tuple[str, ...]:
    """Returns the parts of a path between its numbers.

    Examples:
      >>> words("0/mu/layers_17/w")
      ('', '/mu/layers_', '/w')
    """
    return tuple(_NUMBER.split(path))


def pattern(paths: Sequence[str]) -> str:
    """Returns a pattern for paths with the same `words`.

    Examples:
      >>> pattern(["layers_0/w", "layers_1/w"])
      'layers_{0..1}/w'
    """
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
