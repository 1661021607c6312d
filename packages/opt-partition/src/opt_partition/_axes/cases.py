"""The facts collected about each state leaf during attribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from opt_partition._axes.matching import Match, match_leaves
from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.provenance import Tags
from opt_partition._axes.rules import Answer
from opt_partition._axes.verdicts import Verdict
from opt_partition._trees import KeyPath, flatten_with_paths


@dataclasses.dataclass
class Case:
    """The facts collected about one state leaf so far.

    Attributes:
      key_path: its key path.
      leaf: its shape and dtype.
      matches: the parameters that it may belong to according to its path.
      tags: the provenance of its dimensions.
      owners: the parameters that it may belong to; a single one once determined.
      colour: the colour of its owner.
      answer: the answer of a rule.
      verdicts: the results of changing sizes.
    """

    key_path: KeyPath
    leaf: jax.ShapeDtypeStruct
    matches: tuple[Match, ...]
    tags: Tags = ()
    owners: tuple[int, ...] = ()
    colour: int | None = None
    answer: Answer = None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def rank(self) -> int:
        """Its number of dimensions."""
        return len(self.leaf.shape)

    @property
    def owner(self) -> int | None:
        """The index of the parameter that it belongs to, if there is one."""
        return self.owners[0] if self.owners else None


def open_cases(
    params: Any, state: Any, table: Sequence[Parameter], tags: list[Tags] | None
) -> list[Case]:
    """Returns a case per leaf with its structural matches and provenance, in JAX's order."""
    matches = match_leaves(params, state, table)
    cases = []
    for index, (path, leaf) in enumerate(flatten_with_paths(state)):
        nothing: Tags = ((),) * len(leaf.shape)
        cases.append(Case(path, leaf, matches[index], tags[index] if tags else nothing))
    return cases
