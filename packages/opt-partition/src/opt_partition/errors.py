"""The errors of opt-partition.

```
PartitionError
├── AxesError (ValueError)              logical axes, rules, meshes and shapes that do not match
├── UndecidedError (ValueError)         `strict=True`, and axes could not be determined
├── IndivisibleError (ValueError)       `on_indivisible="error"`, and a dimension is not divisible
└── ShardingMismatchError (ValueError)  a compiled step that is not sharded as expected

ReplicatedWarning (UserWarning)         ZeRO that leaves state replicated
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opt_partition._verify import Report

__all__ = [
    "AxesError",
    "IndivisibleError",
    "PartitionError",
    "ReplicatedWarning",
    "ShardingMismatchError",
    "UndecidedError",
]


class PartitionError(Exception):
    """Base class of all errors raised by this package."""


class AxesError(PartitionError, ValueError):
    """Logical axes, rules, a mesh and shapes do not match; the message lists all paths."""


class UndecidedError(PartitionError, ValueError):
    """The axes of some leaves could not be determined, or two sources disagree; lists all paths."""


class IndivisibleError(PartitionError, ValueError):
    """A dimension is not divisible by the mesh axes assigned to it; lists all paths."""


class ReplicatedWarning(UserWarning):
    """ZeRO leaves more than 1 % of a device's bytes replicated, or its axes have one device."""


class ShardingMismatchError(PartitionError, ValueError):
    """A compiled step is not sharded as expected.

    Attributes:
      report: the report with all findings.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(report.details())

    def __reduce__(self) -> tuple[type[ShardingMismatchError], tuple[Report]]:
        return ShardingMismatchError, (self.report,)
