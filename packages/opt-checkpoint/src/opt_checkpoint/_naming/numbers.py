"""Which of its like a transformation is: names count as `init` returns, inner ones first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from opt_checkpoint._naming.makers import state_name
from opt_checkpoint._naming.schema import Names, Transformation


class Found(NamedTuple):
    """A transformation on a walk from the outermost inwards.

    Attributes:
      made: the transformation, without a number.
      below: how many of the next ones are inside it.
      is_ordered: whether it is known to be made after those before it, and before those after it.
    """

    made: Transformation
    below: int = 0
    is_ordered: bool = True


def beside(parts: Sequence[Sequence[Found]]) -> Iterator[Found]:
    """What one factory holds in several places: nothing says which of them it makes first."""
    names = [{_like(found.made) for found in part} for part in parts]
    for i, part in enumerate(parts):
        others = set[tuple[Names, str]]().union(*names[:i], *names[i + 1 :])
        for found in part:
            is_ordered = found.is_ordered and _like(found.made) not in others
            yield found._replace(is_ordered=is_ordered)


def numbered(walk: Sequence[Found]) -> tuple[Transformation, ...]:
    """Returns the transformations in the order of the walk, each with its number.

    Examples:
      >>> outer, inner = Transformation('MultiSteps'), Transformation('MultiSteps')
      >>> [found.number for found in numbered([Found(outer, below=1), Found(inner)])]
      [2, 1]
    """
    unknown = {_like(found.made) for found in walk if not found.is_ordered}
    counts: dict[tuple[Names, str], int] = {}
    numbers: dict[int, int] = {}
    for i in sorted(range(len(walk)), key=lambda i: (i + walk[i].below, -i)):
        like = _like(walk[i].made)
        if like not in unknown:
            counts[like] = numbers[i] = counts.get(like, 0) + 1
    return tuple(
        dataclasses.replace(found.made, number=numbers.get(i)) for i, found in enumerate(walk)
    )


def _like(made: Transformation) -> tuple[Names, str]:
    return made.group, state_name(made)
