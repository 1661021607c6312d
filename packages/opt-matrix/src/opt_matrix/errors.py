"""The errors of opt-matrix.

```
MatrixError
├── OptionError (ValueError)        arguments that do not fit together
├── UndecidedError (ValueError)     leaves that no rule of `Matrices` decides, or two do
├── PlanError (ValueError)          parameters, shardings or a mesh that a plan does not fit
└── PlanMismatchError (ValueError)  a compiled program that moves more than was planned
```

All but the last, which `MatrixPlan.check` raises, are raised while a program is built or traced.
"""

from __future__ import annotations

__all__ = ["MatrixError", "OptionError", "PlanError", "PlanMismatchError", "UndecidedError"]


class MatrixError(Exception):
    """The base of every error that this package raises on purpose."""


class OptionError(MatrixError, ValueError):
    """An argument has no such value, or does not go with another."""


class UndecidedError(MatrixError, ValueError):
    """No rule says whether a leaf holds matrices, or several rules do; lists every path."""


class PlanError(MatrixError, ValueError):
    """Parameters, shardings and a mesh do not fit together, or not the plan that was made."""


class PlanMismatchError(MatrixError, ValueError):
    """A compiled program has more collectives, or moves more bytes, than the plan says."""
