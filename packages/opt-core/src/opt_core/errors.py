"""The errors of the optimizer contract.

```
OptimizerError
├── DescriptionError (ValueError)   data that describe no state, or a state that is another's
├── EvaluationError (ValueError)    two averages of one parameter, or one of none
├── GroupError (ValueError)         groups that do not divide the parameters, or a group unknown
│   └── SurgeryError                trained state that would be lost, or read as something else
├── HyperParamError (TypeError)     a hyper-parameter that does not exist or cannot be overridden
│   └── UnusedArgumentError         an extra argument that the update does not use
├── RestoreError (ValueError)       a state dict that does not fit; carries the report
├── StateDictError (ValueError)     a tree that has no faithful state dict
├── StateChangedError (TypeError)   an update that would change the shape or structure of the state
└── TreeMismatchError (ValueError)  gradients that do not look like the parameters
```

Each is also the builtin that callers of Flax and T5X already catch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opt_core._report import RestoreReport

__all__ = [
    "DescriptionError",
    "EvaluationError",
    "GroupError",
    "HyperParamError",
    "OptimizerError",
    "RestoreError",
    "StateChangedError",
    "StateDictError",
    "SurgeryError",
    "TreeMismatchError",
    "UnusedArgumentError",
]


class OptimizerError(Exception):
    """The base of every error that these packages raise on purpose."""


class DescriptionError(OptimizerError, ValueError):
    """A description that cannot be: of data that describe no state, or of another's state."""


class EvaluationError(OptimizerError, ValueError):
    """Two averages in a state speak of one parameter, or one of a parameter that is not there."""


class GroupError(OptimizerError, ValueError):
    """Groups do not divide the parameters exactly, or no group has the name asked for."""


class SurgeryError(GroupError):
    """Another definition would drop trained state, or read it as something else.

    Nothing has been changed; the text lists every leaf and setting.
    """


class HyperParamError(OptimizerError, TypeError):
    """An override names no hyper-parameter, or one that cannot change at run time."""


class UnusedArgumentError(HyperParamError):
    """An extra argument is neither a hyper-parameter nor used by the update.

    Attributes:
      names: the arguments that are not used.
    """

    def __init__(self, message: str, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[UnusedArgumentError], tuple[str, list[str]]]:
        return UnusedArgumentError, (str(self), sorted(self.names))


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
    """An update returned a state of another structure or other shapes than it was given."""


class TreeMismatchError(OptimizerError, ValueError):
    """Two trees that must have the same containers, keys and shapes do not."""
