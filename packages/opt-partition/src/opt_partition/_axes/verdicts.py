"""What is asked of changed sizes, and what they answer."""

from __future__ import annotations

import dataclasses

from opt_partition._axes.probing import Shape
from opt_partition._trees import KeyPath


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What changing sizes tells of one state dimension.

    Attributes:
      dim: the parameter dimension that it indexes; `None` if it indexes none.
      parameter: the index of the parameter, where it had to be found.
      is_known: whether the probes agree.
      note: why it indexes none, or why they do not agree.
    """

    dim: int | None = None
    parameter: int | None = None
    is_known: bool = True
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A state leaf to look at.

    Attributes:
      path: its key path.
      shape: its shape.
      parameter: the index of the parameter that it belongs to, if that is known.
      place: where the path of that begins and ends in its own; `None` if it is not there.
      candidates: the parameters that it may belong to by its place, where that leaves several.
    """

    path: KeyPath
    shape: Shape
    parameter: int | None
    place: tuple[int, int] | None = None
    candidates: tuple[int, ...] = ()

    @property
    def around(self) -> KeyPath:
        """The keys that do not tell the parameter."""
        if self.place is None:
            return self.path
        start, stop = self.place
        return *self.path[:start], None, *self.path[stop:]
