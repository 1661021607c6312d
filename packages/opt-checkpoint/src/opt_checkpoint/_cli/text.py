"""Text for a terminal: names out of a checkpoint may hold anything, and are shown with escapes."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from opt_checkpoint._naming.schema import LeafInfo
from opt_checkpoint._planning.plan import Plan


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


def one_line(error: object) -> str:
    """Returns what an error says as one printable line."""
    return printable(" ".join(str(error).split()))


def printable_plan(plan: Plan[Any]) -> Plan[Any]:
    """Returns a plan to be shown, with printable names; it is not one to be applied."""
    rows = (
        dataclasses.replace(
            row,
            leaf=_leaf(row.leaf),
            sources=tuple(map(printable, row.sources)),
            note=printable(row.note),
            problem=printable(row.problem),
        )
        for row in plan.rows
    )
    dropped = (
        dataclasses.replace(gone, leaf=_leaf(gone.leaf), problem=printable(gone.problem))
        for gone in plan.dropped
    )
    return dataclasses.replace(
        plan,
        rows=tuple(rows),
        dropped=tuple(dropped),
        changes=tuple(map(printable, plan.changes)),
        problems=tuple(map(printable, plan.problems)),
    )


def _leaf(leaf: LeafInfo) -> LeafInfo:
    return dataclasses.replace(leaf, path=tuple(map(printable, leaf.path)))
