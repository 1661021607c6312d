"""The errors of opt-accumulate.

```
AccumulationError
├── BatchError (ValueError)       a batch that cannot be cut into the microbatches asked for
├── LossOutputError (TypeError)   a loss function that does not return what was announced
└── OptionError (ValueError)      arguments that do not fit together
```

Each is raised while a program is traced or built, never while it runs.
"""

from __future__ import annotations

__all__ = ["AccumulationError", "BatchError", "LossOutputError", "OptionError"]


class AccumulationError(Exception):
    """The base of every error that this package raises on purpose."""


class BatchError(AccumulationError, ValueError):
    """Leaves of a batch have no common number of rows, or it does not divide; lists every path."""


class LossOutputError(AccumulationError, TypeError):
    """A loss function returned something else than the arguments announced."""


class OptionError(AccumulationError, ValueError):
    """An argument has no such value, or does not go with another."""
