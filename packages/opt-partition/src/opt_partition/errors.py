"""The errors of opt-partition.

```
PartitionError
├── AxesError (ValueError)         logical axes, rules, meshes and shapes that do not fit together
├── UndecidedError (ValueError)    `strict=True`, and some leaf's axes could not be decided
├── IndivisibleError (ValueError)  `on_indivisible="error"`, and a dimension does not divide
└── ShardingMismatchError (ValueError)  a compiled step that is not sharded as asked; has the report
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opt_partition._verify.report import Report

__all__ = [
    "AxesError",
    "IndivisibleError",
    "PartitionError",
    "ShardingMismatchError",
    "UndecidedError",
]


class PartitionError(Exception):
    """The base of every error that this package raises on purpose."""


class AxesError(PartitionError, ValueError):
    """Logical axes, rules, a mesh and shapes do not fit together; lists every path."""


class UndecidedError(PartitionError, ValueError):
    """Axes of some leaves could not be decided, or two sources disagree; lists every path."""


class IndivisibleError(PartitionError, ValueError):
    """A dimension does not divide by the mesh axes that it should lie over; lists every path."""


class ShardingMismatchError(PartitionError, ValueError):
    """A compiled step does not do what was asked of it.

    Attributes:
      report: every finding.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        super().__init__(str(report))

    def __reduce__(self) -> tuple[type[ShardingMismatchError], tuple[Report]]:
        return ShardingMismatchError, (self.report,)
