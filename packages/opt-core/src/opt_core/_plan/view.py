"""What a plan restores into: an optimizer, and how to give it back in the caller's own kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from opt_core._optimizer import Optimizer
from opt_core._paths import Names
from opt_core.storage import PlainOptimizer


@dataclasses.dataclass(frozen=True)
class View:
    """A target as the planner sees it.

    Attributes:
      optimizer: parameters, state and step, with what updates them.
      put_back: makes a target of the given kind from an optimizer and other leaves.
      others: leaves of the model that the optimizer does not update, by path.
      unsaved: fields of the target that are neither: they are kept as they are.
      stored: what `optimizer` is the plain one of, where the target stores leaves differently.
      placement: what the target knows of where its leaves lie, as `params` and `state`.
    """

    optimizer: Optimizer
    put_back: Callable[[Optimizer, Mapping[Names, Any]], Any] = lambda optimizer, _: optimizer
    others: Mapping[Names, Any] = dataclasses.field(default_factory=dict)
    unsaved: tuple[str, ...] = ()
    stored: PlainOptimizer | None = None
    placement: Any = None
