"""The errors of opt-accumulate.

```
AccumulationError
├── BatchError (ValueError)       a batch that cannot be cut into the microbatches asked for
├── LossOutputError (TypeError)   a loss function that does not return what was announced
├── OptionError (ValueError)      arguments that do not fit together
└── StuckError (RuntimeError)     too many mini-steps in a row were skipped
```

All but the last, which `check_skips` raises, are raised while a program is traced or built.
"""

from __future__ import annotations

__all__ = ["AccumulationError", "BatchError", "LossOutputError", "OptionError", "StuckError"]


class AccumulationError(Exception):
    """The base of every error that this package raises on purpose."""


class BatchError(AccumulationError, ValueError):
    """Leaves of a batch have no common number of rows, or it does not divide; lists every path."""


class LossOutputError(AccumulationError, TypeError):
    """A loss function returned something else than the arguments announced."""


class OptionError(AccumulationError, ValueError):
    """An argument has no such value, or does not go with another."""


class StuckError(AccumulationError, RuntimeError):
    """More mini-steps in a row were skipped than a run should bear."""
