"""The errors of the contract, each also the builtin that callers of Flax and T5X already catch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opt_core._plan.plan import Plan
    from opt_core._state_dict import Mismatch

__all__ = [
    "DescriptionError",
    "EvaluationError",
    "GroupError",
    "HyperParamError",
    "LeafError",
    "OptimizerError",
    "RestoreError",
    "StateChangedError",
    "StateDictError",
    "SurgeryError",
    "TreeMismatchError",
]


class OptimizerError(Exception):
    """The base of every error that these packages raise on purpose."""


class DescriptionError(OptimizerError, ValueError):
    """Data that are not a description, or a description that does not fit the state."""


class EvaluationError(OptimizerError, ValueError):
    """A state has two averages of one parameter, or the average of an unknown parameter."""


class GroupError(OptimizerError, ValueError):
    """Groups do not partition the parameters exactly, or no group has the requested name."""


class LeafError(OptimizerError, ValueError):
    """A leaf cannot be named, converted or placed; says which."""


class SurgeryError(OptimizerError, ValueError):
    """Another definition would drop or misread trained state. Nothing has been changed.

    Attributes:
      plan: what would be kept, renamed, converted, initialised and dropped.
    """

    def __init__(self, message: str, plan: Plan[Any]) -> None:
        self.plan = plan
        super().__init__(message)


class HyperParamError(OptimizerError, TypeError):
    """An override does not name a hyper-parameter, or one that cannot change at run time."""


class StateDictError(OptimizerError, ValueError):
    """A tree cannot be written as a state dict: two of its keys would share one name."""


class RestoreError(OptimizerError, ValueError):
    """A state dict does not fit the optimizer it is restored into. Nothing has been restored.

    Attributes:
      mismatches: every deviation, with its path, what was expected and what was found.
      advice: what to do.
    """

    def __init__(
        self,
        mismatches: Iterable[Mismatch],
        advice: str = "Restore into an optimizer built as the saved one was, or correct the dict.",
    ) -> None:
        self.mismatches, self.advice = tuple(mismatches), advice
        count = len(self.mismatches)
        head = f"the state dict does not fit: {count} deviation{'s' * (count > 1)}"
        super().__init__("\n".join([head, *(f"  {m}" for m in self.mismatches), advice]))

    def __reduce__(self) -> tuple[type[RestoreError], tuple[tuple[Mismatch, ...], str]]:
        return RestoreError, (self.mismatches, self.advice)


class StateChangedError(OptimizerError, TypeError):
    """An update returned a state with another structure or other shapes."""


class TreeMismatchError(OptimizerError, ValueError):
    """Two trees that must have the same containers, keys and shapes do not."""
