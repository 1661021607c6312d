"""The questions and results of changing sizes."""

from __future__ import annotations

import dataclasses

from opt_partition._axes.probing import Shape
from opt_partition._trees import KeyPath


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of changing sizes for one state dimension.

    Attributes:
      dim: the parameter dimension that it indexes, or `None`.
      parameter: index of the parameter, if it had to be identified.
      is_known: whether the probes agree.
      note: why it indexes no dimension, or why the probes disagree.
    """

    dim: int | None = None
    parameter: int | None = None
    is_known: bool = True
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A state leaf to be judged.

    Attributes:
      path: its key path.
      shape: its shape.
      parameter: index of the parameter that it belongs to, if known.
      place: start and stop of the parameter's path in its own; `None` if it does not occur.
      candidates: the parameters that it may belong to according to its path, if several.
    """

    path: KeyPath
    shape: Shape
    parameter: int | None
    place: tuple[int, int] | None = None
    candidates: tuple[int, ...] = ()

    @property
    def around(self) -> KeyPath:
        """The keys outside of the parameter's path."""
        if self.place is None:
            return self.path
        start, stop = self.place
        return *self.path[:start], None, *self.path[stop:]
