"""Every kind of target as an `opt_core.Optimizer`, and back.

The planner and the disk know one kind. An adapter shows a target as that, and puts restored leaves
back into what the caller gave. Kinds are told apart by `isinstance`, never by their attributes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from opt_core import Optimizer

from opt_checkpoint._naming.schema import Names
from opt_checkpoint._targets.training_state import OfTrainingState, TrainingState


class View(Protocol):
    """A target as the planner sees it."""

    @property
    def optimizer(self) -> Optimizer:
        """Parameters, state and step, with what updates them."""

    @property
    def others(self) -> Mapping[Names, Any]:
        """Leaves of the model that the optimizer does not update, by path."""

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Fields of the target that belong to neither: they are kept as they are."""

    def put_back(self, optimizer: Optimizer, others: Mapping[Names, Any]) -> Any:
        """Returns a target of the given kind with these leaves."""


@dataclasses.dataclass(frozen=True)
class OfOptimizer:
    """An `opt_core.Optimizer`, which is what it is."""

    optimizer: Optimizer

    @property
    def others(self) -> Mapping[Names, Any]:
        """None: all parameters are the optimizer's."""
        return {}

    @property
    def unsaved(self) -> tuple[str, ...]:
        """None."""
        return ()

    def put_back(self, optimizer: Optimizer, others: Mapping[Names, Any]) -> Any:
        """Returns the optimizer."""
        return optimizer


def view_of(target: Any, *, argument: str = "target") -> View:
    """Returns what the planner sees of a target.

    Args:
      target: of any kind that is taken.
      argument: what the caller calls it, for the message.

    Raises:
      TypeError: it is of none of them; lists them.
      TreeMismatchError: its state is not one of its transformation; lists every path.
    """
    if isinstance(target, Optimizer):
        return OfOptimizer(target)
    if isinstance(target, TrainingState):
        return OfTrainingState.of(target)
    # Where nobody has imported the module, nobody has an object of its classes: Flax NNX takes a
    # second to import, and most runs do without one of them.
    if "flax.training.train_state" in sys.modules:
        from flax.training.train_state import TrainState

        from opt_checkpoint._targets.train_state import OfTrainState

        if isinstance(target, TrainState):
            return OfTrainState.of(target)
    if "flax.nnx" in sys.modules:
        from flax import nnx

        from opt_checkpoint._targets.nnx import OfPair

        if isinstance(target, nnx.Optimizer):
            raise TypeError(
                f"`{argument}`: an `nnx.Optimizer` holds no parameters: give the pair "
                "`(model, optimizer)`"
            )
        if type(target) is tuple and len(target) == 2 and isinstance(target[1], nnx.Optimizer):
            return OfPair.of(*target)
    raise TypeError(
        f"`{argument}`: expected an `opt_core.Optimizer`, a "
        "`TrainingState(tx, params, opt_state)` of plain Optax, a `flax.training.train_state."
        f"TrainState`, or the pair `(model, nnx.Optimizer)`; found {_shown(target)}"
    )


def _shown(target: Any) -> str:
    if type(target) is tuple:
        return f"a tuple of ({', '.join(type(part).__name__ for part in target)})"
    return type(target).__name__
