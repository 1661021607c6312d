"""The errors of the optimizer contract.

```
OptimizerError
├── DescriptionError (ValueError)   data that do not describe this state
├── EvaluationError (ValueError)    two averages of a parameter, or one of none
├── GroupError (ValueError)         groups that do not partition the parameters
├── HyperParamError (TypeError)     a hyper-parameter that does not exist or cannot be overridden
├── LeafError (ValueError)          a leaf that cannot be named, converted or placed
├── RestoreError (ValueError)       a state dict that does not fit; carries the report
├── StateDictError (ValueError)     a tree that has no faithful state dict
├── SurgeryError (ValueError)       trained state that would be lost or misread; carries the plan
├── StateChangedError (TypeError)   an update that would change the shape or structure of the state
└── TreeMismatchError (ValueError)  gradients that do not match the parameters
```

Each is also the builtin that callers of Flax and T5X already catch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opt_core._plan.plan import Plan
    from opt_core._report import RestoreReport

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
    """A state dict does not fit the optimizer it is restored into.

    Nothing has been restored. Not raised under `strict=False`, where the same report is logged.

    Attributes:
      report: every deviation, with its path, what was expected and what was found.
    """

    def __init__(self, report: RestoreReport) -> None:
        self.report = report
        super().__init__(str(report))

    def __reduce__(self) -> tuple[type[RestoreError], tuple[RestoreReport]]:
        return RestoreError, (self.report,)


class StateChangedError(OptimizerError, TypeError):
    """An update returned a state with another structure or other shapes."""


class TreeMismatchError(OptimizerError, ValueError):
    """Two trees that must have the same containers, keys and shapes do not."""
