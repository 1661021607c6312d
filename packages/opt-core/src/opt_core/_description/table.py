"""The printed table of a state description, 80 columns wide."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opt_core._paths import path_str
from opt_core._text import aligned

if TYPE_CHECKING:
    from opt_core._description.values import LeafDescription, TransformationDescription

_COLUMNS = 80
_HEAD = ("transformation", "field", "parameter", "dims", "role", "source")
_PATHS = (0, 1, 2)  # the columns that may be shortened, on the left: names differ on the right


def table(
    leaves: Sequence[LeafDescription], transformations: Sequence[TransformationDescription]
) -> str:
    """Returns a line per leaf, then a line or more per transformation.

    Args:
      leaves: the leaves of a state.
      transformations: all transformations, with or without state.
    """
    rows = [_HEAD, *map(_cells, leaves)]
    widths = _widths(rows)
    short = [[_shortened(*pair) for pair in zip(row, widths, strict=True)] for row in rows]
    settings = [line for transformation in transformations for line in _settings(transformation)]
    return "\n".join([*aligned(short, "<<<<<<"), *([""] if settings else []), *settings])


def _cells(leaf: LeafDescription) -> tuple[str, ...]:
    dimensions = "?" if leaf.dimensions is None else ",".join(map(_dim, leaf.dimensions))
    return (
        _name(leaf.group, leaf.transformation, leaf.number),
        path_str(leaf.field) if leaf.field else "",
        "" if leaf.parameter is None else path_str(leaf.parameter),
        dimensions,
        leaf.role,
        leaf.source,
    )


def _dim(dimension: int | None) -> str:
    return "-" if dimension is None else str(dimension)


def _name(group: Sequence[str], name: str, number: int) -> str:
    numbered = name if number == 1 else f"{name}#{number}"
    return path_str((*group, numbered)) if group else numbered


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    free = _COLUMNS - 2 * (len(_HEAD) - 1)
    while sum(widths) > free:
        wide = [i for i in _PATHS if widths[i] > len(_HEAD[i])]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]


def _settings(of: TransformationDescription) -> Iterator[str]:
    cells = [
        f"{name}={_value(value)}" + (f" ({of.effect(name)})" if name in of.bearing else "")
        for name, value in of.settings.items()
    ]
    if of.parameters is not None:
        cells.append(f"acts on {', '.join(map(path_str, of.parameters)) or 'nothing'}")
    line = f"{_name(of.group, of.name, of.number)}: {', '.join(cells)}".rstrip(": ")
    yield from textwrap.wrap(line, _COLUMNS, subsequent_indent="    ")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
